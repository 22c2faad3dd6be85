"""A strategy mix: the input of every scheduler. It turns drafts of messages into a plan."""

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
    """A message before ordering. ``slot`` is unrolled. Drafts of one slot keep their order."""

    kind: Kind
    parts: tuple[tuple[int, int], ...]
    slot: int
    micro: int = 0
    blocking: bool = False


@dataclass(frozen=True)
class Mix:
    """A strategy per unit for one job.

    An fsdp unit becomes sdp (hsdp: hsdp_no_reshard) if freeing it between forward and backward gains nothing: it has no
    backward, or its backward follows directly after its last forward use. ``budget`` (bytes, None: unlimited) is for schedulers
    that plan with a budget. Plans of the other schedulers are made to fit afterwards.

    Raises PlanError if the number of strategies differs from the number of units, and for a strategy within nodes
    without nodes.
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
        """The profile of the job."""
        return self.job.profile

    @property
    def cross_iteration(self) -> bool:
        """Whether messages may cross from one iteration to the next."""
        return self.job.cross_iteration

    @property
    def period(self) -> Period:
        """The period of the job."""
        return self.job.period

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """All operations of one period."""
        out = []
        for u, (unit, strategy) in enumerate(zip(self.profile.units, self.strategies, strict=True)):
            for kind in strategy.kinds(unit.trainable, unit.backward is not None):
                many = kind.is_gather and strategy.sharded
                out += [Op(kind, u, m) for m in range(self.job.micro_steps if many else 1)]
        return tuple(out)

    def window(self, op: Op) -> tuple[int, int]:
        """Return :meth:`Period.window`, narrowed by the barrier if ``cross_iteration`` is off."""
        first, last = self.period.window(op)
        if not self.cross_iteration and self.profile.units[op.unit].trainable and op.micro == 0:
            if not op.kind.is_gather:
                last = self.period.turn
            elif op.kind.plain is Kind.AG_F:
                first = max(first, self.period.turn)
        return first, last

    def payload(self, op: Op) -> int:
        """Return the bytes of a whole unit, padding included: parameters for a gather, gradients for a reduction."""
        layout = self.profile.layouts[op.unit]
        return layout.param_bytes if op.kind.is_gather else layout.grad_bytes

    def whole(self) -> tuple[tuple[int, ...], ...]:
        """Return one block per section of each unit, with all its elements, padding included."""
        return tuple(layout.sizes for layout in self.profile.layouts)

    def parts(self, unit: int) -> tuple[tuple[int, int], ...]:
        """Return the (unit, block) pairs of a whole unit, for the blocks of :meth:`whole`."""
        return tuple((unit, b) for b in range(len(self.profile.layouts[unit].sections)))

    def cut(self, block_bytes: int) -> tuple[tuple[int, ...], ...]:
        """Return blocks (elements) of about ``block_bytes`` of payload for each unit.

        Cuts are at multiples of 16 elements per rank. If the profile says when gradients become ready, a cut moves to
        the end of a nearby parameter. Raises ValueError for less than one byte.
        """
        if block_bytes < 1:
            raise ValueError(f"block must be >= 1 byte, got {block_bytes}")
        world = self.profile.world
        out = []
        for u, layout in enumerate(self.profile.layouts):
            sizes: list[int] = []
            for section, total in zip(layout.sections, layout.sizes, strict=True):
                step = max(1, round(block_bytes / section.param_bytes / world / 16)) * 16 * world
                count = max(1, round(total / step))  # avoids a small last block: every message pays α
                begin = sum(sizes)
                even = (step * b for b in range(1, count))
                inner = [edge(self.profile, u, begin + e, 16 * world, min(step, total - e), begin) for e in even]
                sizes += [b - a for a, b in itertools.pairwise([begin, *inner, begin + total])]
            out.append(tuple(sizes))
        return tuple(out)

    def plan(self, name: str, blocks: Sequence[tuple[int, ...]], drafts: Iterable[Draft]) -> Plan:
        """Return the plan of these blocks (elements) and drafts, ordered by slot.

        At the barrier, reductions come first.

        A draft with parts of several widths becomes one message per width. Raises PlanError if the drafts make no valid
        plan.
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
    """Return the sequential schedule of a mix, which decides whether strategies fit a budget.

    Compute waits for every message. A reduction is sent when it is ready, a gather when it is needed.
    """
    drafts = []
    for op in mix.ops:
        first, last = mix.window(op)
        drafts.append(Draft(op.kind, mix.parts(op.unit), last if op.kind.is_gather else first, op.micro, True))
    # Between two slots the reduction comes first, so its gradients are freed before the next unit is gathered.
    drafts.sort(key=lambda d: d.kind.is_gather)
    return mix.plan("sequential", mix.whole(), drafts)
