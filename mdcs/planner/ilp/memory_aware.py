"""The memory-aware ILP schedule of a strategy mix: maximal overlap within the bytes that are left.

The slot model (:mod:`mdcs.planner.ilp.slot_model`) with the strategies fixed: every operation is sent once, reductions before the
gathers that follow them, memory per slot within the budget, as little exposed as possible.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.planner.judge import Judge, SlotPlanner


@dataclass(frozen=True)
class MemoryAware(SlotPlanner):
    def schedule(self, mix: Mix) -> Plan:
        judge = Judge(mix.profile, mix.budget, mix.micro_steps, mix.cross_iteration)
        return self.solved(judge, "memory_aware", mix.strategies)
