"""The memory-aware ILP schedule of a strategy mix: maximal overlap within the bytes that are left.

The slot model (:mod:`mdcs.slot_model`) with the strategies fixed: every operation is sent once, reductions before the
gathers that follow them, memory per slot within the budget, as little exposed as possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan import Plan
from mdcs.schedulers.mix import Mix
from mdcs.solver import check_solver
from mdcs.strategies.base import Judge


@dataclass(frozen=True)
class MemoryAware:
    """``solver`` is HIGHS or CBC, ``seconds`` bounds the solve; ``block_bytes`` 0: the link's block.

    Without ``heuristics`` only the solver's own plans are compared, to judge it by.
    """

    solver: str = "HIGHS"
    seconds: float = 20.0
    block_bytes: int = 0
    heuristics: bool = True

    def __post_init__(self) -> None:
        check_solver(self.solver)

    def schedule(self, mix: Mix) -> Plan:
        from mdcs.slot_planner import solve_plan  # which imports the other schedulers

        judge = Judge(mix.profile, mix.budget, mix.micro_steps, mix.cross_iteration)
        return solve_plan(
            judge, "memory_aware", fixed=mix.strategies, solver=self.solver, seconds=self.seconds,
            block_bytes=self.block_bytes, heuristics=self.heuristics,
        )  # fmt: skip
