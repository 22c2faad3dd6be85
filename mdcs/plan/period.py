"""The strategies of units, and the period: one iteration in steady state as a circle of slots, with windows."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from enum import Enum
from functools import cache, lru_cache
from typing import NamedTuple

from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile


class Strategy(str, Enum):
    """Sharding of one unit. docs/concepts.md has the bytes that each strategy holds and sends.

    - ``sharded``: the parameters at rest are a shard. They are gathered before forward.
    - ``regathers``: the unit is resharded after forward and gathered again for backward.
    - ``sharded_update``: gradients are reduce-scattered. A rank holds the optimizer state of its shard, and updates it.
    - ``in_node``: the ranks of a node share the unit, and every node has all its shards. Else the world shares it.
    """

    dp = "dp"  # replicated: all-reduce, full update
    zero2 = "zero2"  # whole parameters; reduce-scatter, update of a shard, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, resharded, gathered again before backward
    hsdp_no_reshard = "hsdp_no_reshard"  # sdp within each node; all nodes have the same shards
    hsdp = "hsdp"  # fsdp within each node

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self.sharded, self.sharded_update = value not in ("dp", "zero2"), value != "dp"
        self.regathers, self.in_node = value in ("fsdp", "hsdp"), value.startswith("hsdp")
        self._reduction, self._forward, self._backward = (
            (Kind.RS_N, Kind.AG_F_N, Kind.AG_B_N) if self.in_node else (Kind.RS, Kind.AG_F, Kind.AG_B)
        )

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """Return the collectives that a unit needs in one period. The reduction comes first."""
        if not (trainable or self.sharded):
            return ()
        if not self.sharded_update:
            return (Kind.AR,)
        update = (self._reduction,) if trainable else ()
        again = (self._backward,) if self.regathers and has_backward else ()
        return (*update, self._forward, *again)

    @property
    def without_reshard(self) -> Strategy:
        """The same strategy, but without freeing the unit between forward and backward."""
        return {Strategy.fsdp: Strategy.sdp, Strategy.hsdp: Strategy.hsdp_no_reshard}.get(self, self)

    def parts(self, profile: Profile) -> int:
        """Return the number of ranks that share a unit's update and its shards."""
        return 1 if not self.sharded_update else profile.per_node if self.in_node else profile.world


def choices(profile: Profile, limited: bool = True) -> list[Strategy]:
    """Return the strategies that are possible on the ranks of a profile; unless bytes are ``limited``, none that
    gathers again for backward: that only saves bytes, and ranks wait there for each other.
    """
    return [k for k in Strategy if (profile.per_node or not k.in_node) and (limited or not k.regathers)]


def block_ready_fractions(profile: Profile, unit: int, blocks: tuple[int, ...]) -> tuple[float, ...]:
    """Return for each block the fraction of the unit's last backward slot after which all its gradients are ready."""
    gradients = profile.units[unit].gradients
    if not gradients:
        return (1.0,) * len(blocks)
    return _parts_of(gradient_ends(profile, unit), tuple(part for _, part in gradients), blocks)


def blocks_by_readiness(profile: Profile, unit: int, blocks: tuple[int, ...]) -> list[int]:
    """Return the blocks of a unit in the order in which their gradients become ready."""
    return sorted(range(len(blocks)), key=block_ready_fractions(profile, unit, blocks).__getitem__)


def gradient_ends(profile: Profile, unit: int) -> tuple[int, ...]:
    """Return where each parameter ends in the unit's flat buffer (elements); empty if gradients have no times."""
    gradients = profile.units[unit].gradients
    return profile.layouts[unit].ends([n for n, _ in gradients]) if gradients else ()


def ready_fraction_in_slot(profile: Profile, unit: int) -> float:
    """Return the fraction of a unit's gradients that are ready before its last backward slot ends."""
    spans = itertools.pairwise([0, *gradient_ends(profile, unit)])
    timed = zip(profile.units[unit].gradients, spans, strict=True)
    return sum(end - begin for (_, part), (begin, end) in timed if part < 1) / profile.layouts[unit].elements


def parameters_in_block(profile: Profile, unit: int, blocks: tuple[int, ...], block: int) -> range:
    """Return the parameters that have elements in a block, as indices in flat order."""
    begin = sum(blocks[:block])
    return _overlapped(gradient_ends(profile, unit), begin, begin + blocks[block])


def snap_to_parameter_boundary(profile: Profile, unit: int, element: int, step: int, apart: int) -> int:
    """Return where to cut a unit near ``element``, in flat elements: the end of a parameter if one is within ``apart //
    3`` (``apart``: distance to the other cuts), rounded up to a multiple of ``step``; otherwise ``element``.

    Rounding up moves the first elements of the next parameter before the cut; their gradient is ready earlier.
    """
    if not profile.units[unit].gradients or apart < 4 * step:
        return element
    near = min(gradient_ends(profile, unit), key=lambda end: abs(end - element))
    return -(-near // step) * step if abs(near - element) <= apart // 3 else element


def _overlapped(ends: Sequence[int], begin: int, end: int) -> range:
    return range(bisect.bisect_right(ends, begin), min(bisect.bisect_left(ends, end) + 1, len(ends)))


@lru_cache(maxsize=4096)
def _parts_of(ends: tuple[int, ...], parts: tuple[float, ...], blocks: tuple[int, ...]) -> tuple[float, ...]:
    spans = itertools.pairwise(itertools.accumulate(blocks, initial=0))
    return tuple([max(parts[own.start : own.stop]) for own in (_overlapped(ends, *span) for span in spans)])


class Op(NamedTuple):
    """One kind of communication of one unit, in one micro-step of a period."""

    kind: Kind
    unit: int
    micro: int


class PeriodSlot(NamedTuple):
    """A slot of the period: its unit, phase (F or B), micro-step, and its index ``place`` in :attr:`Profile.slots`."""

    unit: int
    phase: str
    micro: int
    place: int


class Period:
    """The circle of slots of one iteration in steady state, from the first backward slot of the last micro-step on.

    - ``update_slot``: no update runs before this slot. With a barrier it is the turn: all updates of the iteration come
      between its reductions and its forward pass. Otherwise -1: updates run when their reductions are done.
    - ``turn``: index of the first forward slot. ``length``: number of slots. ``seconds``: profiled seconds of each.
    - ``window(op)``: the first and the last slot at which an operation can be issued (both unrolled).

    Indices in windows and releases are *unrolled*: they may exceed ``length`` and then lie in the next period.
    """

    def __init__(self, profile: Profile, micro_steps: int, has_barrier: bool = False) -> None:
        self.profile, self.micro_steps = profile, micro_steps
        self.turn, self.length = profile.backward_slots, micro_steps * len(profile.slots)
        self.update_slot = self.turn if has_barrier else -1
        places = [(place, micro) for micro in range(micro_steps) for place in range(len(profile.slots))]
        places = [*places[self.length - self.turn :], *places[: self.length - self.turn]]
        slots = [(profile.slots[place], place, micro) for place, micro in places]
        self.slots = tuple(PeriodSlot(s.unit, s.phase, micro, place) for s, place, micro in slots)
        self.seconds = tuple(s.seconds for s, *_ in slots)
        self.window = cache(self._window)

    def ops(self, unit: int, strategy: Strategy) -> list[Op]:
        """Return the operations of a unit: the gathers of a sharded one are sent in every micro-step."""
        of = self.profile.units[unit]
        return [
            Op(kind, unit, micro)
            for kind in strategy.kinds(of.trainable, of.backward is not None)
            for micro in range(self.micro_steps if kind.is_gather and strategy.sharded else 1)
        ]

    def forward(self, unit: int, micro: int) -> tuple[int, int]:
        """Return the first and last forward slot of the unit in a micro-step."""
        start = self.forward_start(micro)
        first, last = self.profile.units[unit].forward
        return start + first, start + last

    def backward(self, unit: int, micro: int) -> tuple[int, int] | None:
        """Return the first and last backward slot, unrolled: behind :meth:`forward` of the same micro-step."""
        span = self.profile.units[unit].backward
        if span is None:
            return None
        start = self.forward_start(micro) + self.profile.forward_slots
        return start + span[0], start + span[1]

    def forward_start(self, micro: int) -> int:
        """Return the slot at which the forward pass of a micro-step begins."""
        return self.turn + micro * len(self.profile.slots)

    def end(self, micro: int) -> int:
        """Return the slot behind the backward pass of a micro-step."""
        return self.forward_start(micro + 1) if micro < self.micro_steps - 1 else self.turn

    def last_use(self, unit: int, micro: int) -> int:
        """Return the last slot (unrolled) that uses the unit's parameters in a micro-step."""
        span = self.backward(unit, micro)
        return self.forward(unit, micro)[1] if span is None else span[1]

    def _window(self, op: Op) -> tuple[int, int]:
        """From the end of the previous use to the use that the operation is sent for. With a barrier, units that are
        trained are reduced by the turn, and gathered from there on.
        """
        kind, unit, micro = op
        last = self.needed_by(op)
        if kind.plain is Kind.AG_B:
            return self.forward(unit, micro)[1] + 1, last
        first = self.last_use(unit, micro - 1 if micro else self.micro_steps - 1) + 1
        if micro == 0:  # the previous use was in the previous period
            first = max(first - self.length, 0)
            if self.update_slot >= 0 and self.profile.units[unit].trainable:
                return (max(first, self.update_slot), last) if kind.is_gather else (first, self.update_slot)
        return first, last

    def needed_by(self, op: Op) -> int:
        """Return the slot (unrolled) whose use an operation is sent for."""
        if op.kind.plain is not Kind.AG_B:
            return self.forward(op.unit, op.micro)[0]
        span = self.backward(op.unit, op.micro)
        assert span is not None, "a unit without backward has no AG_B"
        return span[0]

    def place(self, slot: int, kind: Kind) -> tuple[int, bool]:
        """Return the key by which messages are ordered: their slot, and whether the updates at a barrier come first."""
        slot %= self.length
        return slot, slot == self.update_slot and kind.is_gather

    def release(self, op: Op, strategy: Strategy) -> int:
        """Return the slot (unrolled) after which the buffer of a gather is freed."""
        freed_after_forward = strategy.regathers and op.kind.plain is Kind.AG_F
        return self.forward(op.unit, op.micro)[1] if freed_after_forward else self.last_use(op.unit, op.micro)

    def name(self, slot: int) -> str:
        """Return the name of a slot, as in ``B/1:block.3``: phase, micro-step (if there are several) and unit."""
        s = self.slots[slot % self.length]
        micro = f"/{s.micro}" if self.micro_steps > 1 else ""
        return f"{s.phase}{micro}:{self.profile.units[s.unit].name}"

    def in_words(self, slot: int) -> str:
        """Return a slot in the words of a loop, as in ``the backward of block.3``."""
        s = self.slots[slot % self.length]
        micro = f" in micro-step {s.micro + 1}" if self.micro_steps > 1 else ""
        return f"the {'forward' if s.phase == 'F' else 'backward'} of {self.profile.units[s.unit].name}{micro}"
