"""The profile of a job: its units, slots, optimizer and link. Planners and the simulator read nothing else.

It is measured (``mdcs.profiler.model_profile``), or written by hand for tests and for clusters that one does not have.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import re
import statistics
import types
import typing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mdcs.profile.layout import Layout, WholeParameter, itemsize
from mdcs.profile.link import Collectives, Contention, ExecutionModel, Kind, Link
from mdcs.profile.recompute import RecomputeOption
from mdcs.sizes import MIB

SCHEMA = 7
INPUTS = "inputs"
"""Key of ``Profile.about``: sizes of the profiled batch, in words."""
_LARGEST_BLOCK = 16 * MIB


@dataclass(frozen=True)
class Unit:
    """The smallest group of parameters that is sharded, gathered, reduced and updated together: of one type, with one
    optimizer, all trainable or all frozen. What differs is another unit around the same modules.

    - ``name``: names of its modules, and in brackets what tells it from another unit around the same modules.
    - ``segments``: lengths (elements) of consecutive parts of the flat buffer with one parameter group each, parameters
      with their padding (:func:`mdcs.sizes.aligned`).
    - ``forward``, ``backward``: (first, last) forward or backward slot of a micro-step that uses it. None: no gradient.
    - ``dtype``: type of the parameters in compute, by its name in torch. ``grad_dtype``: of gradients on the wire and
      in shards. ``master_dtype``: of the copy that the optimizer updates. "": that of the parameters; no copy.
    - ``optimizer``: index into :attr:`Profile.optimizers`.
    - ``whole``: the parameters in flat order, where the optimizer needs whole ones; empty where it is elementwise.
    - ``gradients``: (elements, fraction) of each parameter in flat order. The gradient is ready when this fraction of
      the last backward slot is over. Empty: all are ready at the end of the slot.
    - ``aliased``: forward reads the unit's memory outside of its modules, through a tensor that shares the memory.

    Raises ValueError for an empty segment, a type that is not floating, a trainable unit without ``backward``, a frozen
    one with masters, and ``whole`` or ``gradients`` of other elements or with a fraction outside 0..1.
    """

    name: str
    segments: tuple[int, ...]
    trainable: bool
    forward: tuple[int, int]
    backward: tuple[int, int] | None
    dtype: str = "float32"
    grad_dtype: str = ""
    master_dtype: str = ""
    optimizer: int = 0
    whole: tuple[WholeParameter, ...] = ()
    gradients: tuple[tuple[int, float], ...] = ()
    aliased: bool = False

    def __post_init__(self) -> None:
        if not self.segments or min(self.segments) < 1:
            raise ValueError(f"unit {self.name}: segments must be positive, got {self.segments}")
        for dtype in filter(None, (self.dtype, self.grad_dtype, self.master_dtype)):
            itemsize(dtype)
        if self.trainable and self.backward is None:
            raise ValueError(f"unit {self.name}: is trainable but has no backward slot")
        if self.master_dtype and not self.trainable:
            raise ValueError(f"unit {self.name}: is frozen but has masters")
        if self.whole and sum(p.numel for p in self.whole) != self.numel:
            raise ValueError(
                f"unit {self.name}: whole parameters must have its {self.numel} elements, got {self.whole}"
            )
        is_within = all(n > 0 and 0 <= part <= 1 for n, part in self.gradients)
        if self.gradients and not (is_within and sum(n for n, _ in self.gradients) == self.numel):
            raise ValueError(
                f"unit {self.name}: gradients {self.gradients} are not of {self.numel} elements, each within a slot"
            )

    @property
    def modules(self) -> str:
        """Names of its modules, joined by "+": the name without what tells it from another unit around them."""
        return self.name.partition("[")[0]

    def dtype_on_wire(self, is_gather: bool) -> str:
        """Return the type of its elements in messages: parameters are gathered, gradients are reduced."""
        return self.dtype if is_gather else self.grad_dtype or self.dtype

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters, as ``segments`` count them."""
        return sum(self.segments)


@dataclass(frozen=True)
class Slot:
    """One compute interval: forward (``F``) or backward (``B``) of one use of ``unit``.

    - ``live``: bytes at the start of the slot: activations, workspace, everything that is not a registered buffer.
    - ``peak``: the most such bytes during the slot, those included that the next slot begins with.

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

    A *run* is a contiguous piece of a shard with one parameter group. The optimizer sees a run as one tensor.

    - ``state_tensors``: optimizer state, in copies of the run. A fraction: several ranks share the state.
    - ``state_fixed``: further bytes of state per run (Adam: its step counter).
    - ``scratch_tensors``: temporary memory of an update, in copies of the largest run (non-fused Adam: 2).
    - ``seconds_per_element``, ``seconds_per_run``: update time.
    - ``scratch_fixed``: further bytes of temporary memory.
    - ``scratch_fixed_of``: (width, bytes) pairs that replace ``scratch_fixed`` for elements of that width in bytes.
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
        """Return the temporary bytes that the update of a run needs, in addition to the state."""
        return self.scratch_tensors * width * elements + dict(self.scratch_fixed_of).get(width, self.scratch_fixed)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def read(kind: Any, value: Any) -> Any:
    """Return a value of this type from plain containers, as ``dataclasses.asdict`` and JSON have them.

    Types are dataclasses, enums, tuples, dictionaries, and one of these or None. Raises KeyError for a field that a
    dataclass does not have, and what its constructor raises.
    """
    if kind in (int, float, str, bool):
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**{name: read(_hints(kind)[name], each) for name, each in value.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(map(read, kinds, value))
    if origin is dict:
        return {key: read(arguments[1], each) for key, each in value.items()}
    if origin is types.UnionType:
        return None if value is None else read(arguments[0], value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, enum.Enum) else value


def is_far_off(predicted_s: float, measured_s: float) -> bool:
    """Return whether a prediction is off by more than half of the measurement."""
    return abs(predicted_s - measured_s) > measured_s / 2


@dataclass(frozen=True)
class Profile:
    """Measurements of one (model, batch, device, world).

    - ``slots``: slots of one micro-step in executed order: all forward slots, then all backward slots.
    - ``collectives``: the algorithms that carry the messages. The link was measured with them.
    - ``interference``: slowdown of compute while a message is in flight (0.2 = 20 %).
    - ``contention``: cost of messages by their number and bytes.
    - ``execution``: how the backend executes messages.
    - ``copy_seconds_per_byte``: cost of packing a fused message.
    - ``recompute``: alternatives to keeping activations, by unit. A unit without any always keeps them.
    - ``more_optimizers``: those of a model that has several. ``optimizer`` is the first.
    - ``about``: free text for people and for file names: model, device, versions.
    - ``spread``: 10th and 90th percentile of each quantity that was measured several times, by name.
    - ``errors``: standard errors of the costs of messages that training has determined, by name. Other costs are
      assumed, or measured before training.
    - ``calibration_runs``: (predicted, measured) seconds per step of plans that ran, by name. Each is predicted from
      the runs of the others.

    Raises ValueError for another schema, a number out of range, slots in another order, and an index of a unit or slot
    that does not exist.
    """

    units: tuple[Unit, ...]
    slots: tuple[Slot, ...]
    world: int
    link: Link
    optimizer: Optimizer = Optimizer()
    collectives: Collectives = Collectives()
    interference: float = 0.0
    contention: Contention = Contention()
    execution: ExecutionModel = ExecutionModel()
    copy_seconds_per_byte: float = 0.0
    recompute: tuple[RecomputeOption, ...] = ()
    more_optimizers: tuple[Optimizer, ...] = ()
    about: dict[str, str] = field(default_factory=dict, hash=False)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    calibration_runs: dict[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    errors: dict[str, float] = field(default_factory=dict, hash=False)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        _check_schema(self.schema)
        if self.world < 1:
            raise ValueError(f"world must be >= 1, got {self.world}")
        if self.per_node and (not 1 < self.per_node < self.world or self.world % self.per_node):
            raise ValueError(
                f"link per_node must be 0, or more than 1 and divide world={self.world}, got {self.per_node}"
            )
        if self.interference < 0:
            raise ValueError(f"interference must be >= 0, got {self.interference}")
        if not re.fullmatch("F+B+", "".join(s.phase for s in self.slots)):
            raise ValueError("slots must be all forward slots followed by all backward slots, at least one of each")
        for u, unit in enumerate(self.units):
            for span, count in ((unit.forward, self.forward_slots), (unit.backward, self.backward_slots)):
                if span is not None and not 0 <= span[0] <= span[1] < count:
                    raise ValueError(f"unit {u} ({unit.name}): span {span} is outside its {count} slots")
        for s, slot in enumerate(self.slots):
            if not 0 <= slot.unit < len(self.units):
                raise ValueError(f"slot {s}: no unit {slot.unit}")
        if len({(option.unit, option.choice) for option in self.recompute}) < len(self.recompute):
            raise ValueError("a unit has several recompute options of one choice")
        for option in self.recompute:
            if not 0 <= option.unit < len(self.units) or self.units[option.unit].backward is None:
                raise ValueError(f"recompute option {option.choice}: no unit {option.unit} with a backward")
            if any(use.forward >= self.forward_slots or use.backward >= self.backward_slots for use in option.uses):
                raise ValueError(f"recompute option {option.choice} of unit {option.unit} is outside the slots")

    @cached_property
    def forward_slots(self) -> int:
        """Number of forward slots in a micro-step."""
        return sum(s.phase == "F" for s in self.slots)

    @cached_property
    def backward_slots(self) -> int:
        """Number of backward slots in a micro-step."""
        return len(self.slots) - self.forward_slots

    @property
    def prediction_error(self) -> float | None:
        """Median relative error of the predicted steps of ``calibration_runs``; None without any."""
        off = [abs(told / seen - 1) for told, seen in self.calibration_runs.values()]
        return statistics.median(off) if off else None

    @property
    def reliability_warning(self) -> str:
        """The ``calibration_runs`` whose prediction is off by more than half, in words; "" if there are none."""
        doubtful = [
            f"{name} {predicted * 1e3:.1f} ms, measured {measured * 1e3:.1f}"
            for name, (predicted, measured) in self.calibration_runs.items()
            if is_far_off(predicted, measured)
        ]
        return f"predictions are off by more than half in calibration runs ({'; '.join(doubtful)})" if doubtful else ""

    @cached_property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers. The last one is none: parameters that it updates stay as they are."""
        return (self.optimizer, *self.more_optimizers, Optimizer("none"))

    @cached_property
    def has_gradient_times(self) -> bool:
        """Return whether some unit says when its gradients are ready."""
        return any(unit.gradients for unit in self.units)

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each unit's flat buffer."""
        return tuple(
            Layout(
                u.numel, self.world, itemsize(u.dtype), itemsize(u.grad_dtype or u.dtype),
                itemsize(u.master_dtype) if u.master_dtype else 0, u.whole,
            )
            for u in self.units
        )  # fmt: skip

    @cached_property
    def block(self) -> int:
        """Default partition size of units, in payload bytes: it saturates the link, and keeps the fixed cost of a
        message while computing (or the host's time for it) to a tenth of its total, up to a limit of 16 MiB.
        """
        costs, host_s = self.contention, self.execution.host_seconds_per_message
        each = max(costs.message_seconds, costs.compute_per_message, host_s)
        per_byte = max(self.link.beta) * (self.world - 1) / self.world
        return max(self.link.block, int(min(9 * each / per_byte, _LARGEST_BLOCK)) if per_byte else 0)

    def wire(self, kind: Kind, size: int) -> int:
        """Return the bytes that one rank sends. ``size``: bytes of the message's whole payload."""
        return self.collectives.sent(kind, size, self.world, self.per_node)

    def buffer(self, kind: Kind, size: int) -> int:
        """Return the bytes of the algorithm's own buffer on every rank, beside the message; elements if ``size`` is."""
        return self.collectives.buffer(kind, size, self.world, self.per_node)

    def by_type(self, kind: Kind, parts: tuple[tuple[int, int], ...]) -> list[tuple[tuple[int, int], ...]]:
        """Return the (unit, block) pairs grouped by type: a message carries elements of one."""
        if len(parts) == 1:
            return [parts]
        groups: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        for part in parts:  # units of whole parameters go without others: what is packed with others costs a copy
            unit = self.units[part[0]]
            groups.setdefault((unit.dtype_on_wire(kind.is_gather), bool(unit.whole)), []).append(part)
        return [tuple(alike) for alike in groups.values()]

    @property
    def per_node(self) -> int:
        """Ranks of a node. 0 unless there are several nodes of several ranks."""
        return self.link.per_node

    def group(self, kind: Kind) -> int:
        """Return the number of ranks that share a message of this kind: the world, or the ranks of a node."""
        return self.per_node if kind.in_node else self.world

    def to_json(self) -> str:
        """Return the text of profile.json: every field, with the schema."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Profile:
        """Return the profile of ``dataclasses.asdict``. Raises ValueError for an unknown schema or a missing field."""
        try:
            _check_schema(data["schema"])  # first: another schema may lack fields that are read below
            return read(cls, {f.name: data[f.name] for f in dataclasses.fields(cls)})
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a profile: {e}") from e

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile of :meth:`to_json`. Raises ValueError for text that is not a profile of this schema."""
        return cls.from_dict(json.loads(text))


def _check_schema(schema: int) -> None:
    if schema != SCHEMA:
        raise ValueError(f"profile schema {schema} is not the supported {SCHEMA}")
