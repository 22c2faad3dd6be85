"""The floor of a job: the mix whose sequential schedule has the smallest peak.

All fsdp holds least at rest, but where a unit is used it holds the whole unit beside its shard; zero1 and dp hold the unit alone.
Where one large unit makes the peak, that unit is better whole. Peaks of mixes are no sum over units, so the mix is searched for:
from all units alike, by changes of the units that are at work in the slot of the peak, alone and a few at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from mdcs.plan.job import Job
from mdcs.plan.ledger import needs
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy, choices

_AT_ONCE = 2  # units changed together, where a change of one moves the peak to the next
_MOST = 400  # sequential schedules that are tried


@lru_cache(maxsize=64)
def leanest(job: Job) -> tuple[Strategy, ...]:
    """The strategies with the smallest sequential peak that is found: all fsdp unless others need fewer bytes.

    No mix of one strategy needs less. On random jobs of up to four units it is the smallest of all mixes (tests); of many units
    it is the end of a search of at most some hundred schedules, the same in every process.
    """
    search = _Search(job)
    alike = [(strategy,) * len(job.profile.units) for strategy in (Strategy.fsdp, *choices(job.profile))]
    starts = alike[0], min(alike, key=search.peak)
    return min([search.descended(start) for start in starts], key=search.peak)  # all fsdp of those that need as much


@dataclass
class _Search:
    job: Job
    _known: dict[tuple[Strategy, ...], tuple[int, int, Plan]] = field(default_factory=dict)

    def peak(self, mix: tuple[Strategy, ...]) -> int:
        return self._judged(mix)[0]

    def _judged(self, mix: tuple[Strategy, ...]) -> tuple[int, int, Plan]:
        """Peak, its first slot, and the sequential schedule."""
        if mix not in self._known:
            plan = sequential(Mix(self.job, mix))
            by_slot = [need.bytes for need in needs(plan)]
            self._known[mix] = max(by_slot), by_slot.index(max(by_slot)), plan
        return self._known[mix]

    def descended(self, mix: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The mix, changed as long as that lowers its peak."""
        while (better := self._better(mix, self.peak(mix), _AT_ONCE)) is not None:
            mix = better
        return mix

    def _better(self, mix: tuple[Strategy, ...], below: int, changes: int) -> tuple[Strategy, ...] | None:
        """The best mix with a peak below so many bytes of those with one change, else the first with so many at once."""
        changed = [other for other in self._changed(mix) if len(self._known) < _MOST or other in self._known]
        best = min(changed, key=self.peak, default=None)
        if best is not None and self.peak(best) < below:
            return best
        slot = self._judged(mix)[1]
        if changes > 1:
            for other in changed:
                if self._judged(other)[1] != slot:  # it has moved the peak elsewhere
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
    """Units that a slot uses, or has messages of."""
    period = plan.period
    found = {u for m in plan.messages if m.slot == slot for u, _ in m.parts}
    for u in range(len(plan.profile.units)):
        for micro in range(period.micro_steps):
            for span in (period.forward(u, micro), period.backward(u, micro)):
                if span is not None and any(q % period.length == slot for q in range(span[0], span[1] + 1)):
                    found.add(u)
    return sorted(found)
