"""Strategies and schedule in one integer program under the whole budget (:mod:`mdcs.slot_model`)."""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan import Plan
from mdcs.solver import check_solver
from mdcs.strategies.base import Judge


@dataclass(frozen=True)
class Joint:
    """``solver`` is HIGHS or CBC, ``seconds`` bounds the solve; ``block_bytes`` 0: the link's block.

    Without ``heuristics`` only the solver's own plans are compared, to judge it by.
    """

    solver: str = "HIGHS"
    seconds: float = 20.0
    block_bytes: int = 0
    heuristics: bool = True

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def plan(self, judge: Judge) -> Plan:
        """The whole plan within ``judge.budget``; raises InfeasibleBudget."""
        from mdcs.slot_planner import solve_plan  # which imports other strategies

        judge.require_floor()
        return solve_plan(
            judge, "joint", solver=self.solver, seconds=self.seconds, block_bytes=self.block_bytes, heuristics=self.heuristics
        )
