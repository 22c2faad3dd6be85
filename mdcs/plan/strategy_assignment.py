"""A strategy mix: the input of every scheduler. It turns messages into a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from mdcs.plan.job import Job
from mdcs.plan.period import Op, Period, snap_to_parameter_boundary
from mdcs.plan.plan import Plan, PlanError, require_nodes
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.profile.schema import Profile


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
        return tuple(map(self._effective, range(len(self.chosen)), self.chosen))

    def _effective(self, unit: int, strategy: Strategy) -> Strategy:
        if not strategy.regathers:
            return strategy
        span = self.period.backward(unit, 0)
        kept = span is None or self.period.forward(unit, 0)[1] + 1 == span[0]
        return strategy.without_reshard if kept else strategy

    @property
    def profile(self) -> Profile:
        """The profile of the job, with the slots of its recomputation."""
        return self.job.planned_profile

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
