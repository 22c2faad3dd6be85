"""Profiles of a chain of layers that are calculated: parameters, operations and bytes of each layer, without measuring.

The layers come from :mod:`benchmarks.calculated.decoder` and :mod:`benchmarks.calculated.convolutions`, the link
from :mod:`benchmarks.calculated.rings`. A forward takes operations / rate seconds, a backward twice as many. Between
its forward and its backward a layer keeps ``kept`` bytes, its input among them. The output of a layer lives until the
next layer has kept it, and as long as its gradient in backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.profile.link import Collectives, ExecutionModel, Link
from mdcs.profile.recompute import FULL, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit


@dataclass(frozen=True)
class Layer:
    """A part of a model that runs as a whole: one forward slot and one backward slot.

    - ``unit``: name of its unit. Layers with the same name share a unit, whose parameters are theirs together.
    - ``parameters``: elements.
    - ``operations``: floating-point operations of its forward.
    - ``kept``: bytes that forward saves for backward, with its input.
    - ``output``: bytes of its output.
    - ``cheap``: bytes of ``kept`` that selective recomputation frees: neither input nor output of a matrix product that
      is kept. 0: the layer does not recompute.
    - ``workspace``: bytes that only exist while it runs, in forward and in backward.

    Raises ValueError for a negative number.
    """

    unit: str
    parameters: int
    operations: float
    kept: int = 0
    output: int = 0
    cheap: int = 0
    workspace: int = 0

    def __post_init__(self) -> None:
        if min(self.parameters, self.operations, self.kept, self.output, self.cheap, self.workspace) < 0:
            raise ValueError(f"a layer has no negative numbers, got {self}")


@dataclass(frozen=True)
class Precision:
    """Bytes of an element.

    - ``parameter``: in compute, and when gathered.
    - ``gradient``: when reduced.
    - ``master``: of the copy that the optimizer updates. 0: it updates the parameters themselves.
    """

    parameter: int = 4
    gradient: int = 4
    master: int = 0


_TYPES = {1: "float8_e4m3fn", 2: "bfloat16", 4: "float32"}
"""Types by the bytes of an element."""


def layers_profile(
    layers: Sequence[Layer],
    rate: float,
    world: int,
    link: Link,
    *,
    precision: Precision,
    optimizer: Optimizer,
    interference: float = 0.0,
) -> Profile:
    """Return the profile of training a chain of layers on NCCL.

    - ``rate``: operations per second that the device reaches while no message is in flight.
    - ``interference``: slowdown of compute while a message is in flight.

    Updates run on a stream of their own. Layers with ``cheap`` bytes have two options of recomputation.
    """
    last, (parameter, gradient) = len(layers) - 1, (_TYPES[precision.parameter], _TYPES[precision.gradient])
    master = _TYPES[precision.master] if precision.master else ""
    names = list(dict.fromkeys(layer.unit for layer in layers))
    units = []
    for name in names:
        places = [i for i, layer in enumerate(layers) if layer.unit == name]
        first, final = places[0], places[-1]
        numel = sum(layers[i].parameters for i in places)
        spans = (first, final), (last - final, last - first)
        units.append(Unit(name, (numel,), True, *spans, parameter, gradient, master))
    return Profile(
        units=tuple(units),
        slots=_slots(layers, names, rate),
        world=world,
        link=link,
        optimizer=optimizer,
        collectives=Collectives.default("nccl"),
        execution=ExecutionModel("stream"),
        interference=interference,
        recompute=_options(layers, names, rate),
    )


def _slots(layers: Sequence[Layer], names: list[str], rate: float) -> tuple[Slot, ...]:
    before = [0, *itertools.accumulate(layer.kept for layer in layers)]  # bytes kept by the layers before
    inputs = [0, *(layer.output for layer in layers)]
    forward, backward = [], []
    for i, layer in enumerate(layers):
        unit, seconds = names.index(layer.unit), layer.operations / rate
        held = before[i + 1] + layer.output  # once it has run, and when its backward begins
        live = before[i] + inputs[i]
        forward.append(Slot(unit, "F", seconds, live, max(live, held + layer.workspace)))
        backward.append(Slot(unit, "B", 2 * seconds, held, held + inputs[i] + layer.workspace))
    return (*forward, *reversed(backward))


def _options(layers: Sequence[Layer], names: list[str], rate: float) -> tuple[RecomputeOption, ...]:
    found = []
    for i, layer in enumerate(layers):
        if not layer.cheap:
            continue
        unit, last, entry = names.index(layer.unit), len(layers) - 1, layers[i - 1].output
        for choice, freed, seconds in (
            (FULL, layer.kept - entry, layer.operations / rate),
            (SELECTIVE, layer.cheap, 0.0),
        ):
            use = RecomputeUse(i, last - i, freed, seconds, freed + entry + layer.workspace)
            found.append(RecomputeOption(unit, choice, (use,)))
    return tuple(found)
