"""Greedy: from all fsdp, take again and again the change that saves most time per byte, while it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.plan.ledger import bytes_beyond_fsdp
from mdcs.plan.strategy import Strategy
from mdcs.planner.interfaces import Choice
from mdcs.planner.judge import Judge


@dataclass(frozen=True)
class Greedy:
    """Time is communication plus update, unit by unit; bytes are the growth of the sequential peak."""

    name: ClassVar[str] = "greedy"

    def choose(self, judge: Judge) -> Choice:
        """The mix. A change that costs no bytes is free and taken first; ties go to the strategy named first.

        Raises InfeasibleBudget if even all fsdp does not fit.
        """
        profile, units = judge.profile, range(len(judge.profile.units))
        judge.require_floor()
        mix = list(judge.mix((Strategy.fsdp,) * len(units)).strategies)  # units that gain nothing from a second gather are sdp
        cost = [{k: judge.job.cost.unit_s(u, k, judge.job.micro_steps) for k in Strategy} for u in units]
        changes = sorted(
            (
                (-saved / max(1, bytes_beyond_fsdp(profile, u, k)), u, k)
                for u in units
                for k in (Strategy.sdp, Strategy.zero1, Strategy.dp)
                if (saved := cost[u][mix[u]] - cost[u][k]) > 0
            ),
            key=lambda c: c[:2],
        )
        # One ranking serves all rounds (costs are per unit); a unit may later improve on an earlier choice.
        for _, u, k in changes:
            if cost[u][k] >= cost[u][mix[u]]:
                continue
            before, mix[u] = mix[u], k
            if not judge.fits(mix):
                mix[u] = before
        return Choice(tuple(mix))
