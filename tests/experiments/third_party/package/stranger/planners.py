"""A strategy and a scheduler."""

from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision
from mdcs.planner.schedulers import StrategyAssignment


@dataclass(frozen=True)
class EveryNth(Checked):
    """Every nth unit is whole, the others are sharded."""

    name: ClassVar[str] = "every nth"

    n: int = option(2, "one unit in so many is whole", at_least=1)
    whole: str = option("zero2", "its strategy", choices=("dp", "zero2"))

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        units = range(len(problem.profile.units))
        mix = tuple(Strategy.fsdp if unit % self.n else Strategy(self.whole) for unit in units)
        problem.require(mix, f"{self.whole} in every {self.n} units")
        return StrategyDecision(mix)


@dataclass(frozen=True)
class Late(Checked):
    """Reductions as soon as they are ready, gathers just in time."""

    name: ClassVar[str] = "late"

    ahead: int = option(1, "slots by which a gather comes early", at_least=0)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        drafts = []
        for op in mix.ops:
            first, last = mix.period.window(op)
            slot = max(first, last - self.ahead) if op.kind.is_gather else first
            drafts.append(Message(op.kind, ((op.unit, 0),), slot, micro=op.micro))
        return mix.plan(self.name, mix.unpartitioned_blocks(), sorted(drafts, key=lambda d: (d.slot, d.kind.is_gather)))
