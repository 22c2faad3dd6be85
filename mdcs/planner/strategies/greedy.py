"""Greedy: repeat the change that saves most time per byte and fits, from the leanest mix and from all fsdp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.lifetimes import bytes_beyond_fsdp
from mdcs.plan.strategy import Strategy, choices
from mdcs.planner.judge import Choice, Judge

_BEYOND_FSDP = Strategy.hsdp, Strategy.sdp, Strategy.hsdp_no_reshard, Strategy.zero2, Strategy.dp


@dataclass(frozen=True)
class Greedy:
    """Time is communication plus update, unit by unit. Bytes are the growth of the sequential peak."""

    name: ClassVar[str] = "greedy"

    def choose(self, judge: Judge) -> Choice:
        """Return the faster of the mixes from both starts.

        A change that costs no bytes comes first. Ties go to the strategy that is listed first. Raises InfeasibleBudget
        for a budget below the floor.
        """
        return Choice(min([self._from(start, judge) for start in judge.starts()], key=judge.seconds))

    def _from(self, start: Sequence[Strategy], judge: Judge) -> tuple[Strategy, ...]:
        profile, period, units = judge.profile, judge.job.period, range(len(judge.profile.units))
        mix = list(judge.mix(start).strategies)  # Mix turns fsdp into sdp where a second gather gains nothing
        cost = [{k: judge.job.cost.unit_s(u, k, judge.job.micro_steps) for k in choices(profile)} for u in units]
        changes = sorted(
            (
                (-saved / max(1, bytes_beyond_fsdp(period, u, k)), u, k)
                for u in units
                for k in _BEYOND_FSDP
                if k in cost[u] and (saved := cost[u][mix[u]] - cost[u][k]) > 0
            ),
            key=lambda c: c[:2],
        )
        # One ranking serves all rounds, because costs are per unit. A unit may later improve on an earlier choice.
        # After changes that fit, twice as many are tried at once; after changes that do not fit, half as many.
        held, i, many = judge.sequential_needs(mix), 0, 1
        while i < len(changes):
            trial = list(mix)
            for _, u, k in changes[i : i + many]:
                if cost[u][k] < cost[u][trial[u]]:
                    trial[u] = k
            if trial == mix or (many == 1 and _is_too_much(judge, held, changes[i][1], mix, changes[i][2])):
                i += many
                continue
            needs = judge.sequential_needs(trial)
            if judge.budget is None or max(needs) <= judge.budget:
                mix, held, i, many = trial, needs, i + many, 2 * many
            elif many == 1:
                i += 1
            else:
                many //= 2
        return tuple(mix)


def _is_too_much(judge: Judge, held: Sequence[int], unit: int, mix: Sequence[Strategy], strategy: Strategy) -> bool:
    """Whether a unit of this strategy certainly exceeds the budget, found without making a schedule.

    - ``held``: bytes of the mix by slot. Between its forward and its backward the unit holds its extra bytes, and
      nothing else changes.
    """
    if judge.budget is None:
        return False
    period, micro = judge.job.period, judge.job.micro_steps - 1
    backward = period.backward(unit, micro)
    if backward is None:
        return False
    more = bytes_beyond_fsdp(period, unit, strategy) - bytes_beyond_fsdp(period, unit, mix[unit])
    between = range(period.forward(unit, micro)[1] + 1, backward[0])
    return max([held[q % period.length] for q in between], default=0) + more > judge.budget
