"""The floor of a job: the mix whose sequential schedule has the smallest peak.

All fsdp holds least at rest. But a slot that uses an fsdp unit holds the whole unit in addition to its shard, whereas
zero2 and dp hold only the whole unit. If one large unit makes the peak, that unit is better whole. The peak of a mix is
not a sum over units, so the mix is found by a search. The search starts from uniform mixes and changes the units at
work in the slot of the peak, one or a few at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from mdcs.plan.job import Job
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix
from mdcs.plan.strategy import Strategy, choices
from mdcs.plan.worst_case import needs
from mdcs.planner.schedulers.sequential import sequential

_AT_ONCE = 2  # units changed together, because changing one may move the peak to another
_MOST = 400  # sequential schedules tried


@lru_cache(maxsize=64)
def leanest(job: Job) -> tuple[Strategy, ...]:
    """Return the strategies with the smallest sequential peak found: all fsdp unless other mixes need fewer bytes.

    No uniform mix needs fewer bytes. On random jobs of up to four units the result is the minimum over all mixes
    (tests). With many units it is the result of a search of some hundred schedules at most, the same in every process.
    """
    search = _Search(job)
    alike = [(strategy,) * len(job.profile.units) for strategy in (Strategy.fsdp, *choices(job.profile))]
    starts = alike[0], min(alike, key=search.peak)
    return min([search.descended(start) for start in starts], key=search.peak)  # ties: all fsdp, the first start


@dataclass
class _Search:
    job: Job
    _known: dict[tuple[Strategy, ...], tuple[int, int, Plan]] = field(default_factory=dict)

    def peak(self, mix: tuple[Strategy, ...]) -> int:
        return self._judged(mix)[0]

    def _judged(self, mix: tuple[Strategy, ...]) -> tuple[int, int, Plan]:
        """Return the peak, its first slot, and the sequential schedule."""
        if mix not in self._known:
            plan = sequential(Mix(self.job, mix))
            by_slot = [need.bytes for need in needs(plan)]
            self._known[mix] = max(by_slot), by_slot.index(max(by_slot)), plan
        return self._known[mix]

    def descended(self, mix: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the mix after changes, as long as they lower its peak."""
        while (better := self._better(mix, self.peak(mix), _AT_ONCE)) is not None:
            mix = better
        return mix

    def _better(self, mix: tuple[Strategy, ...], below: int, changes: int) -> tuple[Strategy, ...] | None:
        """Return a mix with a peak below ``below`` bytes, or None.

        It is the best mix with one change. If there is none, it is the first found with up to ``changes`` changes.
        """
        changed = [other for other in self._changed(mix) if len(self._known) < _MOST or other in self._known]
        best = min(changed, key=self.peak, default=None)
        if best is not None and self.peak(best) < below:
            return best
        slot = self._judged(mix)[1]
        if changes > 1:
            for other in changed:
                if self._judged(other)[1] != slot:  # the change has moved the peak to another slot
                    found = self._better(other, below, changes - 1)
                    if found is not None:
                        return found
        return None

    def _changed(self, mix: tuple[Strategy, ...]) -> Iterator[tuple[Strategy, ...]]:
        _, slot, plan = self._judged(mix)
        for u in _at_work(plan, slot):
            for strategy in choices(self.job.profile):
                if strategy is not mix[u]:
                    yield (*mix[:u], strategy, *mix[u + 1 :])


def _at_work(plan: Plan, slot: int) -> list[int]:
    """Return the units that a slot uses, or that messages of the slot carry."""
    period = plan.period
    found = {u for m in plan.messages if m.slot == slot for u, _ in m.parts}
    for u in range(len(plan.profile.units)):
        for micro in range(period.micro_steps):
            for span in (period.forward(u, micro), period.backward(u, micro)):
                if span is not None and any(q % period.length == slot for q in range(span[0], span[1] + 1)):
                    found.add(u)
    return sorted(found)
