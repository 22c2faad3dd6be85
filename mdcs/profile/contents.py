"""What is known of a job before planning: its units, slots, optimizer and link.

A :class:`Profile` is measured (``mdcs.calibrate.slots``) or written down by hand (tests, clusters one does
not have). Planners and the simulator read nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mdcs.profile.algorithms import Collectives
from mdcs.profile.layout import Layout, Section
from mdcs.profile.link import Kind, Link
from mdcs.sizes import MIB

SCHEMA = 6


@dataclass(frozen=True)
class Unit:
    """The smallest group of parameters that is sharded, gathered, reduced and updated together.

    ``segments`` are the lengths in elements, in flat order, of the parts that share one type and one optimizer parameter
    group; they sum to ``numel``. ``sections`` are those of one type; none: all is of the profile's widths. ``forward`` and
    ``backward`` are the first and the last slot, as indices into the forward and the backward slots of one micro-step, in which
    the unit's parameters are used; ``backward`` is None when no gradient flows through the unit. ``gradients`` tells when they
    come: (elements, part of the last backward slot that is over then) of its parameters in flat order; none: at the slot's end.
    ``aliased``: forward uses its memory outside of its modules, through a tensor that shares it.
    Raises ValueError for an empty segment, for sections that are not made of whole segments, for a trainable unit without
    ``backward``, and for gradients of other elements or outside their slot.
    """

    name: str
    segments: tuple[int, ...]
    trainable: bool
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    sections: tuple[Section, ...] = ()
    gradients: tuple[tuple[int, float], ...] = ()
    aliased: bool = False

    def __post_init__(self) -> None:
        if not self.segments or min(self.segments) < 1:
            raise ValueError(f"unit {self.name}: segments must be positive, got {self.segments}")
        ends = set(itertools.accumulate(self.segments))
        sections = list(itertools.accumulate(s.numel for s in self.sections)) or [self.numel]
        if not ends.issuperset(sections) or sections[-1] != self.numel:
            raise ValueError(f"unit {self.name}: segments {self.segments} do not make sections that end at {sections}")
        if self.trainable and self.backward is None:
            raise ValueError(f"unit {self.name}: is trainable but has no backward slot")
        if self.gradients and (
            sum(n for n, _ in self.gradients) != self.numel or not all(n > 0 and 0 <= part <= 1 for n, part in self.gradients)
        ):
            raise ValueError(f"unit {self.name}: gradients {self.gradients} are not of {self.numel} elements, each within a slot")

    @cached_property
    def numel(self) -> int:
        """Elements of all its parameters, without padding."""
        return sum(self.segments)


@dataclass(frozen=True)
class Slot:
    """One compute interval: forward (``F``) or backward (``B``) of one use of ``unit``.

    ``live`` is what activations, workspace and everything else that is no registered buffer hold when the slot
    begins; ``peak`` the most they hold during it, what the next slot begins with included (bytes). ``unit`` is an index.
    Raises ValueError for another phase, and for a negative number.
    """

    unit: int
    phase: str
    seconds: float
    live: int
    peak: int

    def __post_init__(self) -> None:
        if self.phase not in ("F", "B"):
            raise ValueError(f"slot phase must be 'F' or 'B', got {self.phase!r}")
        if self.seconds < 0 or self.live < 0 or self.peak < 0:
            raise ValueError("slot seconds and bytes must be >= 0")


@dataclass(frozen=True)
class Optimizer:
    """Bytes and time of an update.

    A *run* is a contiguous piece of a shard with one parameter group: one tensor for the optimizer.
    State is ``state_tensors`` copies of the run (a fraction where others share it) plus ``state_fixed`` bytes (Adam:
    its step counter); scratch is ``scratch_tensors`` copies of the largest run (non-fused Adam: 2) plus
    ``scratch_fixed`` bytes, of elements of other widths what ``scratch_fixed_of`` has for them in (width, bytes) pairs.
    """

    name: str = "sgd"
    state_tensors: float = 0
    state_fixed: int = 0
    scratch_tensors: int = 0
    seconds_per_element: float = 0.0
    seconds_per_run: float = 0.0
    scratch_fixed: int = 0
    scratch_fixed_of: tuple[tuple[int, int], ...] = ()

    def scratch(self, elements: int, width: int) -> int:
        """Bytes that the update of a run takes beside the state."""
        return self.scratch_tensors * width * elements + dict(self.scratch_fixed_of).get(width, self.scratch_fixed)


_LARGEST_BLOCK = 16 * MIB


@dataclass(frozen=True)
class Contention:
    """What communicating costs where the cores that compute also copy bytes and run the dispatcher.

    Computing takes longer by ``compute_per_message`` seconds for every message that is done beside it, by
    ``compute_per_byte`` for every byte it sends, and by ``compute_per_work`` of the seconds of copying, summing and
    updating that it brings; if it all-reduces, ``all_reduce`` times as much. A message beside computing keeps the link
    for at least ``message_seconds`` + ``seconds_per_byte`` · wire bytes, whereas the link's gap and β are what it takes
    while nothing computes: of the two the longer counts, never their sum. Compute that waits for a message goes on
    ``dispatch_seconds`` after it is done, and then takes longer by ``compute_per_wait`` of the time it has waited: its
    caches are cold, its core has slept. Between backward and the next forward the training loop itself takes
    ``turn_seconds``. Raises ValueError for a negative number.
    """

    compute_per_message: float = 0.0
    compute_per_byte: float = 0.0
    compute_per_work: float = 0.0
    message_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    dispatch_seconds: float = 0.0
    compute_per_wait: float = 0.0
    turn_seconds: float = 0.0
    all_reduce: float = 1.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 0:
                raise ValueError(f"contention {name} must be >= 0, got {value}")


def is_far_off(predicted_s: float, measured_s: float) -> bool:
    """Whether a prediction is off from what was measured by more than half of it."""
    return abs(predicted_s - measured_s) > measured_s / 2


@dataclass(frozen=True)
class Profile:
    """What was measured of (model, batch, device, world).

    ``slots`` are those of one micro-step in executed order: all forward slots, then all backward slots.
    ``collectives`` are the algorithms that the link was measured with, and that carry the messages.
    ``param_bytes`` and ``grad_bytes`` are the widths of an element in compute and on the wire. ``master_bytes`` is that of the
    copy which the optimizer updates, in mixed precision; 0: it updates the parameters themselves. Units with ``sections`` have
    widths of their own.
    ``interference`` is how much slower computing is while a message is in flight (0.2 = 20 %), ``contention`` what
    messages cost by their number and bytes.
    ``copy_seconds_per_byte`` is the price of packing a fused message and of summing a reduce-scatter.
    ``about`` says what was measured (model, device, versions): free text for people and for file names. ``spread``
    has the 10th and the 90th percentile of what was measured several times, by name. ``rehearsed`` has the seconds per step,
    predicted with this profile and measured, of the plans that it was fitted to; ``doubted`` those that are far apart.

    Raises ValueError for another schema, a number out of range, slots in another order, and an index of a unit or slot that
    there is not.
    """

    units: tuple[Unit, ...]
    slots: tuple[Slot, ...]
    world: int
    link: Link
    optimizer: Optimizer = Optimizer()
    param_bytes: int = 4
    grad_bytes: int = 4
    master_bytes: int = 0
    collectives: Collectives = Collectives()
    interference: float = 0.0
    contention: Contention = Contention()
    copy_seconds_per_byte: float = 0.0
    about: dict[str, str] = field(default_factory=dict, hash=False)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    rehearsed: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_schema(self.schema)
        if self.world < 1:
            raise ValueError(f"world must be >= 1, got {self.world}")
        if self.per_node and (not 1 < self.per_node < self.world or self.world % self.per_node):
            raise ValueError(f"link per_node must be 0, or more than 1 and divide world={self.world}, got {self.per_node}")
        if self.interference < 0:
            raise ValueError(f"interference must be >= 0, got {self.interference}")
        phases = "".join(s.phase for s in self.slots)
        if not self.slots or phases.lstrip("F").strip("B") or not phases.startswith("F") or "B" not in phases:
            raise ValueError("slots must be all forward slots followed by all backward slots, at least one of each")
        for u, unit in enumerate(self.units):
            for span, count in ((unit.forward, self.forward_slots), (unit.backward, self.backward_slots)):
                if span is not None and not 0 <= span[0] <= span[1] < count:
                    raise ValueError(f"unit {u} ({unit.name}): span {span} is outside its {count} slots")
        for s, slot in enumerate(self.slots):
            if not 0 <= slot.unit < len(self.units):
                raise ValueError(f"slot {s}: no unit {slot.unit}")

    @cached_property
    def forward_slots(self) -> int:
        """Forward slots of a micro-step."""
        return sum(s.phase == "F" for s in self.slots)

    @cached_property
    def backward_slots(self) -> int:
        """Backward slots of a micro-step."""
        return len(self.slots) - self.forward_slots

    @cached_property
    def doubted(self) -> dict[str, tuple[float, float]]:
        """Those of ``rehearsed`` that are predicted more than half off: predictions with this profile are in doubt."""
        return {name: seconds for name, seconds in self.rehearsed.items() if is_far_off(*seconds)}

    @cached_property
    def is_mixed(self) -> bool:
        """Whether some units have widths of their own."""
        return any(unit.sections for unit in self.units)

    @cached_property
    def tells_gradients(self) -> bool:
        """Whether it is known of some unit when its gradients come."""
        return any(unit.gradients for unit in self.units)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Where each unit's elements lie, and their widths; what is frozen has no masters."""
        out = []
        for unit in self.units:
            sections = unit.sections or (Section(unit.numel, self.param_bytes, self.grad_bytes, self.master_bytes),)
            if not unit.trainable:
                sections = tuple(dataclasses.replace(s, master_bytes=0) for s in sections)
            out.append(Layout(sections, self.world))
        return tuple(out)

    @cached_property
    def block(self) -> int:
        """Payload bytes into which units are partitioned unless told otherwise: they saturate the link, and what a message
        costs whatever its size, beside computing, is at most a tenth of it.
        """
        each = max(self.contention.message_seconds, self.contention.compute_per_message)
        per_byte = max(self.link.beta) * (self.world - 1) / self.world
        return max(self.link.block, int(min(9 * each / per_byte, _LARGEST_BLOCK)) if per_byte else 0)

    def wire(self, kind: Kind, size: int) -> int:
        """Bytes that one rank sends for a message whose whole payload is ``size`` bytes."""
        if kind.in_node:
            return self.collectives.sent_by_node(kind, size, self.per_node, self.world // self.per_node)
        return self.collectives.sent(kind, size, self.world)

    def buffer(self, kind: Kind, size: int) -> int:
        """Bytes (or elements, for a ``size`` in elements) that the algorithm of such a message needs beside it, on every rank."""
        if kind.in_node:
            return self.collectives.buffer_by_node(kind, size, self.per_node, self.world // self.per_node)
        return self.collectives.buffer(kind, size, self.world)

    @property
    def per_node(self) -> int:
        """Ranks of a node, where there are several nodes of several ranks; else 0."""
        return self.link.per_node

    def group(self, kind: Kind) -> int:
        """Among how many ranks messages of this kind are divided: the world, or those of a node."""
        return self.per_node if kind.in_node else self.world

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain containers; ``per_node``, ``gradients``, ``aliased`` only where they say something."""
        data = dataclasses.asdict(self)
        if not self.per_node:
            del data["link"]["per_node"]
        for unit in data["units"]:
            if not unit["gradients"]:
                del unit["gradients"]
            if not unit["aliased"]:
                del unit["aliased"]
        return data

    def to_json(self) -> str:
        """The text of profile.json: every field, with the schema."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """Inverse of :meth:`to_dict`; raises ValueError on an unknown schema or a missing field."""
        try:
            _check_schema(data["schema"])  # before a field that another schema does not have is missed
            return cls(
                units=tuple(
                    Unit(
                        u["name"],
                        tuple(u["segments"]),
                        u["trainable"],
                        (u["forward"][0], u["forward"][1]),
                        None if u["backward"] is None else (u["backward"][0], u["backward"][1]),
                        tuple(Section(**s) for s in u.get("sections", ())),
                        tuple((n, part) for n, part in u.get("gradients", ())),
                        u.get("aliased", False),
                    )
                    for u in data["units"]
                ),
                slots=tuple(Slot(**s) for s in data["slots"]),
                link=Link.from_dict(data["link"]),
                optimizer=Optimizer(
                    **data["optimizer"]
                    | {"scratch_fixed_of": tuple((w, n) for w, n in data["optimizer"].get("scratch_fixed_of", ()))}
                ),
                collectives=Collectives(**data["collectives"]),
                contention=Contention(**data["contention"]),
                spread={name: (low, high) for name, (low, high) in data["spread"].items()},
                rehearsed={name: (predicted, measured) for name, (predicted, measured) in data["rehearsed"].items()},
                **{
                    k: data[k]
                    for k in (
                        "world", "param_bytes", "grad_bytes", "master_bytes", "interference",
                        "copy_seconds_per_byte", "about", "schema",
                    )
                },
            )  # fmt: skip
        except (KeyError, TypeError, IndexError) as e:
            raise ValueError(f"not a profile: {e}") from e

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Inverse of :meth:`to_json`; raises ValueError for a text that is no profile of this schema."""
        return cls.from_dict(json.loads(text))


def _check_schema(schema: int) -> None:
    if schema != SCHEMA:
        raise ValueError(f"profile schema {schema} is not the supported {SCHEMA}")
