"""Strategy planners without a solver: from a planning problem to a strategy per unit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.lifetimes import extra_bytes_vs_fsdp
from mdcs.plan.period import Strategy, choices
from mdcs.planner.feasibility import PlanningProblem, StrategyDecision


@dataclass(frozen=True)
class Uniform(Checked):
    """All units have the strategy ``each``."""

    each: str = option("fsdp", "the strategy of all units", choices=tuple(map(str, Strategy)))

    @property
    def name(self) -> str:
        """Name of the strategy."""
        return self.each

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return the mix. Raises InfeasibleBudget, with the bytes that the mix needs, if it does not fit."""
        mix = (Strategy(self.each),) * len(problem.profile.units)
        problem.require(mix, f"strategy {self.each}")
        return StrategyDecision(mix)


@dataclass(frozen=True)
class RandomMix(Checked):
    """Draws a strategy per unit. The same ``seed`` gives the same mix."""

    name: ClassVar[str] = "random"
    seed: int = option(0, "seed of the draw", at_least=0)

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return a random mix. While it is too large, one more random unit becomes fsdp, or takes its strategy in the
        leanest mix if all fsdp does not fit. Raises InfeasibleBudget.
        """
        smallest = problem.starts()[-1]
        rng = random.Random(self.seed)
        mix = [rng.choice(choices(problem.profile)) for _ in problem.profile.units]
        order = [u for u, s in enumerate(mix) if s is not smallest[u]]
        rng.shuffle(order)
        while not problem.fits(mix):
            unit = order.pop()
            mix[unit] = smallest[unit]
        return StrategyDecision(tuple(mix))


_BEYOND_FSDP = Strategy.hsdp, Strategy.sdp, Strategy.hsdp_no_reshard, Strategy.zero2, Strategy.dp


@dataclass(frozen=True)
class Greedy:
    """Time is communication plus update, unit by unit. Bytes are the growth of the sequential peak."""

    name: ClassVar[str] = "greedy"

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        """Return the faster of the mixes from both starts. A change that costs no bytes comes first; ties go to the
        strategy that is listed first. Raises InfeasibleBudget for a budget below the floor.
        """
        return StrategyDecision(min([self._from(start, problem) for start in problem.starts()], key=problem.seconds))

    def _from(self, start: Sequence[Strategy], problem: PlanningProblem) -> tuple[Strategy, ...]:
        profile, period, units = problem.profile, problem.job.period, range(len(problem.profile.units))
        mix = list(problem.mix(start).strategies)  # Mix turns fsdp into sdp where a second gather gains nothing
        cost = [{k: problem.job.cost.unit_s(u, k, problem.job.micro_steps) for k in choices(profile)} for u in units]
        saved = [(cost[u][mix[u]] - cost[u][k], u, k) for u in units for k in _BEYOND_FSDP if k in cost[u]]
        changes = [(-s / max(1, extra_bytes_vs_fsdp(period, u, k)), u, k) for s, u, k in saved if s > 0]
        changes.sort(key=lambda c: c[:2])
        # One ranking serves all rounds, because costs are per unit. A unit may later improve on an earlier choice.
        # After changes that fit, twice as many are tried at once; after changes that do not fit, half as many.
        held, i, many = problem.sequential_needs(mix), 0, 1
        while i < len(changes):
            trial = list(mix)
            for _, u, k in changes[i : i + many]:
                if cost[u][k] < cost[u][trial[u]]:
                    trial[u] = k
            if trial == mix or (many == 1 and _is_too_much(problem, held, changes[i][1], mix, changes[i][2])):
                i += many
                continue
            needs = problem.sequential_needs(trial)
            if problem.budget is None or max(needs) <= problem.budget:
                mix, held, i, many = trial, needs, i + many, 2 * many
            elif many == 1:
                i += 1
            else:
                many //= 2
        return tuple(mix)


def _is_too_much(
    problem: PlanningProblem, held: Sequence[int], unit: int, mix: Sequence[Strategy], strategy: Strategy
) -> bool:
    """Return whether a unit of this strategy certainly exceeds the budget, found without making a schedule: between its
    forward and its backward it holds its extra bytes beside those of the mix by slot, ``held``.
    """
    period, micro = problem.job.period, problem.job.micro_steps - 1
    backward = period.backward(unit, micro)
    if problem.budget is None or backward is None:
        return False
    more = extra_bytes_vs_fsdp(period, unit, strategy) - extra_bytes_vs_fsdp(period, unit, mix[unit])
    between = range(period.forward(unit, micro)[1] + 1, backward[0])
    return max([held[q % period.length] for q in between], default=0) + more > problem.budget
