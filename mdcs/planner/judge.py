"""What strategy planners share: the sequential peak of a mix and the error for a budget that nothing fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.plan.ledger import peak
from mdcs.plan.messages import Plan, Strategy
from mdcs.plan.mix import Mix
from mdcs.planner.ilp.solver import Solving
from mdcs.planner.schedulers.sequential import Sequential
from mdcs.profile.contents import Profile


class InfeasibleBudget(ValueError):
    """``smallest`` is the smallest feasible budget in bytes; None if none is."""

    def __init__(self, budget: int, smallest: int | None, what: str) -> None:
        feasible = "no budget is enough" if smallest is None else f"the smallest feasible budget is {smallest} bytes"
        super().__init__(f"{what} does not fit {budget} bytes: {feasible}")
        self.budget, self.smallest, self.what = budget, smallest, what

    def __reduce__(self) -> tuple[type, tuple[int, int | None, str]]:  # rank 0's goes to all ranks
        return type(self), (self.budget, self.smallest, self.what)


@dataclass(frozen=True)
class SlotPlanner(Solving):
    """What plans by the slot model (:mod:`mdcs.planner.ilp.slot_planner`); ``block_bytes`` 0: the link's block.

    Without ``heuristics`` only the solver's own plans are compared, to judge it by.
    """

    block_bytes: int = 0
    heuristics: bool = True

    def solved(self, judge: Judge, name: str, fixed: Sequence[Strategy] | None = None) -> Plan:
        from mdcs.planner.ilp.slot_planner import solve_plan  # which imports strategies and schedulers

        return solve_plan(
            judge, name, fixed=fixed, solver=self.solver, seconds=self.seconds, block_bytes=self.block_bytes,
            heuristics=self.heuristics,
        )  # fmt: skip


@dataclass(frozen=True)
class Judge:
    """Judges mixes of one job by their peak with the sequential schedule. ``budget`` None is unlimited."""

    profile: Profile
    budget: int | None
    micro_steps: int = 1
    cross_iteration: bool = True
    reserve: int = 0

    def mix(self, strategies: Sequence[Strategy]) -> Mix:
        return Mix(self.profile, tuple(strategies), self.micro_steps, self.cross_iteration)

    def sequential(self, strategies: Sequence[Strategy]) -> Plan:
        return Sequential().schedule(self.mix(strategies))

    def peak(self, strategies: Sequence[Strategy]) -> int:
        """Bytes, reserve included."""
        return peak(self.sequential(strategies)) + self.reserve

    @property
    def floor(self) -> int:
        """Smallest feasible peak: all fsdp, sequential schedule."""
        return self.peak([Strategy.fsdp] * len(self.profile.units))

    def require_floor(self) -> None:
        """Raise InfeasibleBudget unless at least all fsdp fits."""
        self.require([Strategy.fsdp] * len(self.profile.units), "even all fsdp")

    def fits(self, strategies: Sequence[Strategy]) -> bool:
        return self.budget is None or self.peak(strategies) <= self.budget

    def require(self, strategies: Sequence[Strategy], what: str) -> None:
        """Raise InfeasibleBudget unless the mix fits; the error names what ``what`` itself would need."""
        if self.budget is not None and not self.fits(strategies):
            raise InfeasibleBudget(self.budget, self.peak(strategies), what)
