"""A strategy mix: what every scheduler starts from, and how it turns drafts of messages into a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mdcs.plan.early import edge
from mdcs.plan.job import Job
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.period import Op, Period
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError, require_nodes
from mdcs.plan.widths import by_width
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind


@dataclass(frozen=True)
class Draft:
    """A message before it is ordered; ``slot`` is unrolled. Drafts of one slot keep the order they are given in."""

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    micro: int = 0
    blocking: bool = False


@dataclass(frozen=True)
class Mix:
    """A strategy per unit for one job.

    An fsdp unit whose last forward use is followed at once by its backward has nothing to gain from being
    freed in between: it becomes sdp (hfsdp: hsdp). ``budget`` is what the plan may use (bytes; None: unlimited), for
    schedulers that plan with it; the others are made to fit it afterwards. Raises PlanError for another number of strategies
    than of units, and for one that the ranks do not have.
    """

    job: Job
    strategies: tuple[Strategy, ...]
    budget: int | None = None

    def __post_init__(self) -> None:
        if len(self.strategies) != len(self.profile.units):
            raise PlanError(f"{len(self.strategies)} strategies for {len(self.profile.units)} units")
        require_nodes(self.profile, self.strategies)
        object.__setattr__(self, "strategies", tuple(map(self._effective, range(len(self.strategies)))))

    def _effective(self, unit: int) -> Strategy:
        strategy = self.strategies[unit]
        if not strategy.regathers:
            return strategy
        span = self.period.backward(unit, 0)
        kept = span is None or self.period.forward(unit, 0)[1] + 1 == span[0]
        return strategy.kept if kept else strategy

    @property
    def profile(self) -> Profile:
        """That of the job."""
        return self.job.profile

    @property
    def cross_iteration(self) -> bool:
        """Whether messages may cross from one iteration to the next."""
        return self.job.cross_iteration

    @property
    def period(self) -> Period:
        """That of the job."""
        return self.job.period

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Every communication of one period."""
        out = []
        for u, (unit, strategy) in enumerate(zip(self.profile.units, self.strategies, strict=True)):
            for kind in strategy.kinds(unit.trainable, unit.backward is not None):
                many = kind.is_gather and strategy.sharded
                out += [Op(kind, u, m) for m in range(self.job.micro_steps if many else 1)]
        return tuple(out)

    def window(self, op: Op) -> tuple[int, int]:
        """:meth:`Period.window`, narrowed by the barrier when ``cross_iteration`` is off."""
        first, last = self.period.window(op)
        if not self.cross_iteration and self.profile.units[op.unit].trainable and op.micro == 0:
            if not op.kind.is_gather:
                last = self.period.turn
            elif op.kind.plain is Kind.AG_F:
                first = max(first, self.period.turn)
        return first, last

    def payload(self, op: Op) -> int:
        """Bytes of a whole unit, padded: of its parameters for a gather, of its gradients for a reduction."""
        layout = self.profile.layouts[op.unit]
        return layout.param_bytes if op.kind.is_gather else layout.grad_bytes

    def whole(self) -> tuple[tuple[int, ...], ...]:
        """One block per unit, all its elements, padded; one per section where a unit has several types."""
        return tuple(layout.sizes for layout in self.profile.layouts)

    def parts(self, unit: int) -> tuple[tuple[int, int], ...]:
        """The (unit, block) pairs of all of a unit, in the blocks of :meth:`whole`."""
        return tuple((unit, b) for b in range(len(self.profile.layouts[unit].sections)))

    def cut(self, block_bytes: int) -> tuple[tuple[int, ...], ...]:
        """Blocks (elements) of about ``block_bytes`` of payload per unit, cut at multiples of 16 elements per rank; where it is
        known when gradients come, at ends of parameters if there are any near.

        Raises ValueError for less than a byte.
        """
        if block_bytes < 1:
            raise ValueError(f"block must be >= 1 byte, got {block_bytes}")
        world = self.profile.world
        out = []
        for u, layout in enumerate(self.profile.layouts):
            sizes: list[int] = []
            for section, total in zip(layout.sections, layout.sizes, strict=True):
                step = max(1, round(block_bytes / section.param_bytes / world / 16)) * 16 * world
                count = max(1, round(total / step))  # no tail much smaller than a block: α is paid per message
                begin = sum(sizes)
                even = (step * b for b in range(1, count))
                inner = [edge(self.profile, u, begin + e, 16 * world, min(step, total - e), begin) for e in even]
                sizes += [b - a for a, b in itertools.pairwise([begin, *inner, begin + total])]
            out.append(tuple(sizes))
        return tuple(out)

    def plan(self, name: str, blocks: Sequence[tuple[int, ...]], drafts: Iterable[Draft]) -> Plan:
        """The plan of these blocks (elements) and drafts, ordered by slot; reductions go first at the barrier.

        A draft whose parts are of several widths becomes a message for each, one after the other. Raises PlanError for drafts
        that make no valid plan.
        """
        length = self.period.length
        turn = self.period.turn

        def key(d: Draft) -> tuple[int, int]:
            slot = d.slot % length
            behind = not self.cross_iteration and slot == turn and d.kind.is_gather
            return slot, int(behind)

        messages = tuple(
            Message(d.kind, parts, d.slot % length, d.blocking, d.micro)
            for d in sorted(drafts, key=key)
            for parts in by_width(self.profile, blocks, d.kind, d.parts)
        )
        return Plan(self.job, self.strategies, tuple(blocks), messages, scheduler=name)


def sequential(mix: Mix) -> Plan:
    """The sequential schedule of a mix, by which budgets judge strategies: compute waits for every message, each at the moment it
    is ready (reductions) or needed (gathers).
    """
    drafts = []
    for op in mix.ops:
        first, last = mix.window(op)
        drafts.append(Draft(op.kind, mix.parts(op.unit), last if op.kind.is_gather else first, op.micro, True))
    # At one boundary the reduction comes first: its gradients are freed before the next unit is gathered.
    drafts.sort(key=lambda d: d.kind.is_gather)
    return mix.plan("sequential", mix.whole(), drafts)
