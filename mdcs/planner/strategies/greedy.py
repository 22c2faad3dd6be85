"""Greedy: from the floor's mix and from all fsdp, take again and again the change that saves most time per byte that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.ledger import bytes_beyond_fsdp
from mdcs.plan.strategy import Strategy, choices
from mdcs.planner.interfaces import Choice
from mdcs.planner.judge import Judge

_BEYOND_FSDP = Strategy.hfsdp, Strategy.sdp, Strategy.hsdp, Strategy.zero1, Strategy.dp


@dataclass(frozen=True)
class Greedy:
    """Time is communication plus update, unit by unit; bytes are the growth of the sequential peak."""

    name: ClassVar[str] = "greedy"

    def choose(self, judge: Judge) -> Choice:
        """The faster of the mixes from both starts. A change that costs no bytes is free and taken first; ties go to the strategy
        named first.

        Raises InfeasibleBudget for less than the floor.
        """
        return Choice(min([self._from(start, judge) for start in judge.starts()], key=judge.seconds))

    def _from(self, start: Sequence[Strategy], judge: Judge) -> tuple[Strategy, ...]:
        profile, units = judge.profile, range(len(judge.profile.units))
        mix = list(judge.mix(start).strategies)  # units that gain nothing from a second gather are sdp
        cost = [{k: judge.job.cost.unit_s(u, k, judge.job.micro_steps) for k in choices(profile)} for u in units]
        changes = sorted(
            (
                (-saved / max(1, bytes_beyond_fsdp(profile, u, k)), u, k)
                for u in units
                for k in _BEYOND_FSDP
                if k in cost[u] and (saved := cost[u][mix[u]] - cost[u][k]) > 0
            ),
            key=lambda c: c[:2],
        )
        # One ranking serves all rounds (costs are per unit); a unit may later improve on an earlier choice. Twice as many changes
        # are tried at once after some that fit, half as many after some that do not.
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
    """Whether a unit of this strategy is over the budget, given the bytes of the mix by slot, without making a schedule: from its
    forward to its backward it holds what it is bigger by, and nothing else changes there.
    """
    if judge.budget is None:
        return False
    period, micro, profile = judge.job.period, judge.job.micro_steps - 1, judge.profile
    backward = period.backward(unit, micro)
    if backward is None:
        return False
    more = bytes_beyond_fsdp(profile, unit, strategy) - bytes_beyond_fsdp(profile, unit, mix[unit])
    between = range(period.forward(unit, micro)[1] + 1, backward[0])
    return max([held[q % period.length] for q in between], default=0) + more > judge.budget
