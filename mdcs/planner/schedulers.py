"""Communication schedulers without a solver: from a strategy mix (:class:`StrategyAssignment`) to ordered messages.

A proposed plan is fitted to its budget afterwards (:func:`mdcs.planner.budget_repair.repair`). The scheduler that sends
the nearest deadline first is :mod:`mdcs.planner.priority`.

- sequential: no overlap; compute waits for every message. It decides whether strategies fit a budget.
- wait-free back-propagation (Poseidon, PyTorch DDP): a reduction is issued when the backward of its unit ends. The
  gather of zero2 follows at once, as in a decomposed all-reduce; those of sdp and fsdp come one unit ahead, as in FSDP.
- fusion: several units in one message, which then pays α once. ``Fusion`` fills buckets of a fixed size, as Horovod and
  DDP do. ``MgWfbp`` merges optimally for the α–β model (MG-WFBP, Shi et al., INFOCOM 2019), by dynamic programming.
- DeAR (Zhang et al., ICDCS 2023): a decoupled all-reduce; reduce-scatters beside backward, all-gathers beside forward.
- random: a baseline, and the generator of property tests.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.job import Job
from mdcs.plan.period import Op, Period, Strategy, blocks_by_readiness, snap_to_parameter_boundary
from mdcs.plan.plan import Plan, PlanError, require_nodes
from mdcs.plan.schedule import Message
from mdcs.profile.link import REDUCTION, Kind
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import undelayed
from mdcs.sizes import MIB


@dataclass(frozen=True)
class StrategyAssignment:
    """A strategy per unit for one job: the ``chosen`` one, but for units that gain nothing by it.

    An fsdp unit becomes sdp (hsdp: hsdp_no_reshard) if it has no backward, or its backward follows directly after its
    last forward use. ``budget`` (bytes, None: unlimited) is for schedulers that plan with one; plans of others are made
    to fit afterwards. Raises PlanError for another number of strategies, and for one within nodes without nodes.
    """

    job: Job
    chosen: tuple[Strategy, ...]
    budget: int | None = None

    def __post_init__(self) -> None:
        if len(self.chosen) != len(self.profile.units):
            raise PlanError(f"{len(self.chosen)} strategies for {len(self.profile.units)} units")
        require_nodes(self.profile, self.chosen)

    @cached_property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategy of each unit."""
        out = list(self.chosen)
        for u, strategy in enumerate(self.chosen):
            if strategy.regathers:
                span = self.period.backward(u, 0)
                if span is None or self.period.forward(u, 0)[1] + 1 == span[0]:
                    out[u] = strategy.without_reshard
        return tuple(out)

    @property
    def profile(self) -> Profile:
        """The profile of the job, with the slots of its recomputation."""
        return self.job.period.profile

    @property
    def period(self) -> Period:
        """The period of the job."""
        return self.job.period

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All operations of one period."""
        return tuple(op for u, strategy in enumerate(self.strategies) for op in self.period.ops(u, strategy))

    def payload(self, op: Op) -> int:
        """Return the bytes of a whole unit, padding included: parameters for a gather, gradients for a reduction."""
        layout = self.profile.layouts[op.unit]
        return layout.param_bytes if op.kind.is_gather else layout.grad_bytes

    def unpartitioned_blocks(self) -> tuple[tuple[int, ...], ...]:
        """Return one block for each unit, with all its elements, padding included."""
        return tuple((layout.elements,) for layout in self.profile.layouts)

    def partition(self, block_bytes: int) -> tuple[tuple[int, ...], ...]:
        """Return blocks (elements) of about ``block_bytes`` of payload for each unit.

        Cuts are at multiples of 16 elements per rank, moved to the end of a nearby parameter where the profile says
        when gradients become ready; a unit of whole parameters is one block. Raises ValueError for less than one byte.
        """
        if block_bytes < 1:
            raise ValueError(f"block must be >= 1 byte, got {block_bytes}")
        world = self.profile.world
        out = []
        for u, layout in enumerate(self.profile.layouts):
            total, step = layout.elements, max(1, round(block_bytes / layout.param_width / world / 16)) * 16 * world
            # avoids a small last block: every message pays α
            count = 1 if layout.is_whole else max(1, round(total / step))
            even = (step * b for b in range(1, count))
            inner = [snap_to_parameter_boundary(self.profile, u, e, 16 * world, min(step, total - e)) for e in even]
            out.append(tuple([b - a for a, b in itertools.pairwise([0, *inner, total])]))
        return tuple(out)

    def plan(self, name: str, blocks: Sequence[tuple[int, ...]], messages: Iterable[Message]) -> Plan:
        """Return the plan of these blocks (elements) and messages, whose slots may be unrolled, in any order of slots.

        Messages of one slot keep their order, but at the barrier reductions come first. Parts of several types become
        one message per type. Raises PlanError if the messages make no valid plan.
        """
        length = self.period.length
        ordered = tuple(
            Message(m.kind, parts, m.slot % length, m.blocking, m.micro)
            for m in sorted(messages, key=lambda m: self.period.place(m.slot, m.kind))
            for parts in self.profile.by_type(m.kind, m.parts)
        )
        return Plan(self.job, self.strategies, tuple(blocks), ordered, scheduler=name)


def sequential(mix: StrategyAssignment) -> Plan:
    """Return the sequential schedule. A reduction is sent when it is ready, a gather when it is needed."""
    messages = []
    for op in sorted(mix.ops, key=lambda op: op.kind.is_gather):  # gradients are freed before the next gather
        slot = mix.period.window(op)[1 if op.kind.is_gather else 0]
        messages.append(Message(op.kind, ((op.unit, 0),), slot, blocking=True, micro=op.micro))
    return mix.plan("sequential", mix.unpartitioned_blocks(), messages)


@dataclass(frozen=True)
class Sequential:
    """The scheduler of :func:`sequential`."""

    name: ClassVar[str] = "sequential"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the sequential schedule."""
        return sequential(mix)


def ready_slot(mix: StrategyAssignment, op: Op) -> int:
    """Return the slot (unrolled) at which WFBP issues an operation."""
    first, last = mix.period.window(op)
    if not op.kind.is_gather or mix.strategies[op.unit] is Strategy.zero2:
        return first
    return max(first, last - 1)


def in_ready_order(mix: StrategyAssignment) -> list[Op]:
    """Return the operations by issue slot. Within one slot, reductions come first, then gathers by deadline."""
    return sorted(mix.ops, key=lambda op: (ready_slot(mix, op), op.kind.is_gather, mix.period.window(op)[1]))


def as_ready(mix: StrategyAssignment, name: str, blocks: tuple[tuple[int, ...], ...]) -> Plan:
    """Return a plan with one message per block, issued at the slots of WFBP."""
    drafts = [
        Message(op.kind, ((op.unit, b),), ready_slot(mix, op), micro=op.micro)
        for op in in_ready_order(mix)
        for b in blocks_by_readiness(mix.profile, op.unit, blocks[op.unit])
    ]
    return mix.plan(name, blocks, drafts)


@dataclass(frozen=True)
class Wfbp:
    """One message per unit and kind."""

    name: ClassVar[str] = "wfbp"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages when ready, in the order of the computation."""
        return as_ready(mix, "wfbp", mix.unpartitioned_blocks())


@dataclass(frozen=True)
class Solving(Checked):
    """Options of planners that use a solver (:mod:`mdcs.planner.ilp`)."""

    seconds: float = option(20.0, "limit of the solver, seconds", above=0)


@dataclass(frozen=True)
class Blocks(Checked):
    """Options of schedulers that partition units."""

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)

    def partition(self, mix: StrategyAssignment) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of every unit, in elements."""
        return mix.partition(mix.profile.block if self.block_mib is None else max(1, int(self.block_mib * MIB)))


@dataclass(frozen=True)
class Partitioning(Blocks):
    """WFBP with every unit partitioned into blocks."""

    name: ClassVar[str] = "partitioning"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages when ready, one per block."""
        return as_ready(mix, self.name, self.partition(mix))


def fuse(mix: StrategyAssignment, name: str, grouping: Callable[[list[Op]], list[list[Op]]]) -> Plan:
    """Group each stream of operations (kind, micro-step) in its order of use. Return the plan with fused groups.

    A fused reduction is issued when its last member is ready, a fused gather in time for its first member. Such a slot
    always exists: a stream lies at one boundary between two passes, and all its windows contain this boundary.
    """
    streams: dict[tuple[Kind, int], list[Op]] = {}
    for op in in_ready_order(mix):
        streams.setdefault((op.kind, op.micro), []).append(op)
    drafts = []
    reduced: dict[int, int] = {}  # unit -> issue slot of its reduction
    for (kind, micro), stream in sorted(streams.items(), key=lambda item: item[0][0].is_gather):
        if kind.is_gather:
            stream = sorted(stream, key=lambda op: mix.period.window(op)[1])
        for group in grouping(stream):
            slot = max(mix.period.window(op)[0] for op in group)
            if kind.is_gather:
                slot = max(slot, min(ready_slot(mix, op) for op in group))
                if kind.plain is Kind.AG_F and micro == 0:
                    slot = max([slot, *(reduced.get(op.unit, 0) for op in group)])
            else:
                reduced |= {op.unit: slot for op in group}
            drafts.append(Message(kind, tuple((op.unit, 0) for op in group), slot, micro=micro))
    drafts.sort(key=lambda d: (d.kind.is_gather, d.slot))
    return mix.plan(name, mix.unpartitioned_blocks(), drafts)


@dataclass(frozen=True)
class Fusion(Checked):
    """Buckets of a fixed size. The default is that of DDP."""

    name: ClassVar[str] = "fusion"
    bucket_mib: float = option(25.0, "size of a fused message, MiB", above=0)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages of WFBP with neighbours fused."""
        return fuse(mix, self.name, lambda stream: buckets(mix, stream, self.bucket_mib))


def buckets(mix: StrategyAssignment, stream: list[Op], bucket_mib: float) -> list[list[Op]]:
    """Return the stream in groups of at least ``bucket_mib`` of payload, except for the last group."""
    bucket_bytes = max(1, int(bucket_mib * MIB))
    groups: list[list[Op]] = []
    size = bucket_bytes
    for op in stream:
        if size >= bucket_bytes:
            groups.append([])
            size = 0
        groups[-1].append(op)
        size += mix.payload(op)
    return groups


@dataclass(frozen=True)
class MgWfbp:
    """Merges so that the last message of a stream ends as early as possible (gathers: starts as late as possible)."""

    name: ClassVar[str] = "mg_wfbp"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages of WFBP with neighbours merged by :func:`optimal_merge`."""
        return fuse(mix, self.name, lambda stream: optimal_merge(mix, stream))


def optimal_merge(mix: StrategyAssignment, stream: list[Op]) -> list[list[Op]]:
    """Return the groups whose last message ends first: end[j] = min over i of max(ready, end[i]) + α + β·bytes(i..j).

    A gather stream is the same problem in reversed time: deadlines become ready times, the first message the last.
    """
    if not stream:
        return []
    kind, link, times = stream[0].kind, mix.profile.link, undelayed(mix.period)
    ops = stream[::-1] if kind.is_gather else stream
    windows = map(mix.period.window, ops)
    ready = [-times.arrival(last) if kind.is_gather else times.arrival(first) for first, last in windows]
    wire = [mix.profile.wire(kind, mix.payload(op)) for op in ops]
    best: list[tuple[float, int]] = [(min(ready), 0)]
    for j in range(1, len(ops) + 1):
        choices, size, last_ready = [], 0, -float("inf")
        for i in range(j - 1, -1, -1):
            size += wire[i]
            last_ready = max(last_ready, ready[i])
            choices.append((max(last_ready, best[i][0]) + link.alpha_of(kind) + link.beta_of(kind) * size, i))
        best.append(min(choices))
    groups, j = [], len(ops)
    while j:
        i = best[j][1]
        groups.append(ops[i:j])
        j = i
    return [group[::-1] for group in groups] if kind.is_gather else groups[::-1]


@dataclass(frozen=True)
class Dear(Checked):
    """Fuses neighbours up to ``bucket_mib``. Gathers fsdp units ``ahead`` slots before their use."""

    name: ClassVar[str] = "dear"
    bucket_mib: float | None = option(None, "size of a fused message, MiB; null: one message per unit", above=0)
    ahead: int = option(2, "slots between the gather of an fsdp unit and its use", at_least=0)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the plan: reductions when ready, gathers from the turn on, in the order of the forward pass."""
        fused = fuse(mix, self.name, lambda stream: buckets(mix, stream, self.bucket_mib or 0))
        turn, period = mix.period.turn, mix.period
        drafts = []
        for m, slot, need in zip(fused.messages, fused.schedule.slot, fused.schedule.needed_by, strict=True):
            if m.kind.is_gather:
                first = max([turn, *(mix.period.window(Op(m.kind, u, m.micro))[0] for u, _ in m.parts)])
                keep = not any(mix.strategies[u].regathers for u, _ in m.parts)
                slot = first if keep else max(first, need - self.ahead)
            drafts.append((slot % period.length, m.kind.is_gather, max(need, 0), m, slot))
        drafts.sort(key=lambda d: d[:3])  # gathers of one slot in the order of the forward pass
        messages = [Message(m.kind, m.parts, slot, micro=m.micro) for *_, m, slot in drafts]
        return mix.plan(self.name, mix.unpartitioned_blocks(), messages)


@dataclass(frozen=True)
class RandomOrder(Checked):
    """Cuts units, fuses messages and chooses issue slots at random. The same ``seed`` gives the same plan."""

    name: ClassVar[str] = "random"
    seed: int = option(0, "seed of the draw", at_least=0)
    max_blocks: int = option(3, "largest number of blocks of a unit", at_least=1)
    fuse: float = option(0.3, "probability that a message is fused with the one before it", at_least=0, at_most=1)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return a random valid plan."""
        rng, world, blocks = random.Random(self.seed), mix.profile.world, []
        for layout in mix.profile.layouts:
            total = layout.elements
            cuts = [rng.randint(0, total // world) * world for _ in range(rng.randrange(self.max_blocks))]
            edges = [0, total] if layout.is_whole else sorted([0, *cuts, total])
            blocks.append(tuple(b - a for a, b in itertools.pairwise(edges) if b > a))
        slots: dict[tuple[Kind, int, int, int], int] = {}
        for op in sorted(mix.ops, key=lambda o: o.kind.is_gather):  # reductions first: gathers follow them
            for b in range(len(blocks[op.unit])):
                first, last = mix.period.window(op)
                if op.kind in REDUCTION and op.micro == 0:
                    first = max(first, slots.get((REDUCTION[op.kind], op.unit, 0, b), first))
                slots[op.kind, op.unit, op.micro, b] = rng.randint(first, last)
        keys = list(slots)
        rng.shuffle(keys)
        keys.sort(key=lambda k: k[0].is_gather)
        drafts: list[Message] = []
        for kind, unit, micro, block in keys:
            slot = slots[kind, unit, micro, block]
            fits = drafts and drafts[-1].kind is kind and drafts[-1].micro == micro and drafts[-1].slot == slot
            if fits and rng.random() < self.fuse:
                drafts[-1] = Message(kind, (*drafts[-1].parts, (unit, block)), slot, micro=micro)
            else:
                drafts.append(Message(kind, ((unit, block),), slot, micro=micro))
        return mix.plan(self.name, blocks, drafts)
