"""The floor of a job: the mix whose sequential schedule has the smallest peak, and the recomputation that lowers it
most.

All fsdp holds least at rest. But a slot that uses an fsdp unit holds the whole unit in addition to its shard, whereas
zero2 and dp hold only the whole unit. If one large unit makes the peak, that unit is better whole. The peak of a mix is
not a sum over units, so the mix is found by a search. The search starts from uniform mixes and changes the units at
work in the slot of the peak.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import NamedTuple, TypeVar

import numpy as np

from mdcs.plan.job import Job, peak_changes
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy, choices
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.worst_case import worst_case_bytes_by_slot
from mdcs.planner.schedulers.sequential import sequential
from mdcs.profile.recompute import CHOICES, NONE, RecomputeOption, uniform

_MOST = 400  # sequential schedules that one descent tries
_T = TypeVar("_T", tuple[Strategy, ...], Job)
_SHARPNESS = 24  # power of a slot's bytes, relative to the peak: how little slots below the peak count


class _Needs(NamedTuple):
    """The bytes that each slot of a sequential schedule needs, and the schedule."""

    by_slot: list[int]
    plan: Plan

    @property
    def peak(self) -> int:
        """The largest need."""
        return max(self.by_slot)

    def units_at_peak(self) -> list[int]:
        """Return the units that the slot of the peak uses, or that its messages carry."""
        slot, period = self.by_slot.index(self.peak), self.plan.period
        found = {u for m in self.plan.messages if m.slot == slot for u, _ in m.parts}
        for u in range(len(self.plan.profile.units)):
            for micro in range(period.micro_steps):
                for span in (period.forward(u, micro), period.backward(u, micro)):
                    if span is not None and any(q % period.length == slot for q in range(span[0], span[1] + 1)):
                        found.add(u)
        return sorted(found)


def _needs(job: Job, mix: tuple[Strategy, ...]) -> _Needs:
    plan = sequential(StrategyAssignment(job, mix))
    return _Needs([need.bytes for need in worst_case_bytes_by_slot(plan)], plan)


def _descended(start: _T, needs: Callable[[_T], _Needs], changed: Callable[[_T, int], list[_T]]) -> _T:
    """Return ``start`` after changes of one unit at the peak at a time, as long as they lower the peak.

    - ``needs``: those of a choice. ``changed``: the choices that differ in one unit.
    """
    tried = 0
    while tried < _MOST:
        changes = [each for u in needs(start).units_at_peak() for each in changed(start, u)]
        tried += len(changes)
        best = min(changes, key=lambda each: needs(each).peak, default=start)
        if needs(best).peak >= needs(start).peak:
            break
        start = best
    return start


@lru_cache(maxsize=64)
def min_peak_strategies(job: Job) -> tuple[Strategy, ...]:
    """Return the strategies with the smallest sequential peak found: all fsdp unless other mixes need fewer bytes.

    No uniform mix needs fewer bytes. On random jobs of up to four units the result is the minimum over all mixes
    (tests). With many units it is the result of a search, the same in every process.
    """
    needs = cache(partial(_needs, job))

    def peak(mix: tuple[Strategy, ...]) -> int:
        return needs(mix).peak

    def changed(mix: tuple[Strategy, ...], u: int) -> list[tuple[Strategy, ...]]:
        return [(*mix[:u], k, *mix[u + 1 :]) for k in choices(job.profile) if k is not mix[u]]

    alike = [(strategy,) * len(job.profile.units) for strategy in (Strategy.fsdp, *choices(job.profile))]
    starts = alike[0], min(alike, key=peak)
    return min((_descended(each, needs, changed) for each in starts), key=peak)  # ties: all fsdp, the first start


@lru_cache(maxsize=64)
def min_peak_job(job: Job) -> Job:
    """Return the job with the recomputation of the smallest sequential peak found, with the strategies that need least.

    The search starts from the uniform choices. The last of the :func:`recompute_steps` is tried, too.
    """
    known = {(option.unit, option.choice) for option in job.profile.recompute}

    def changed(job: Job, u: int) -> list[Job]:
        now = job.recompute or (NONE,) * len(job.profile.units)
        found = [c for c in CHOICES if c != now[u] and (c == NONE or (u, c) in known)]
        return [dataclasses.replace(job, recompute=(*now[:u], c, *now[u + 1 :])) for c in found]

    def floor(job: Job) -> int:
        """Return the floor of a job whose recomputation is decided, without its reserve."""
        return _needs(job, min_peak_strategies(job)).peak

    alike = dict.fromkeys(uniform(job.profile.recompute, len(job.profile.units), choice) for choice in CHOICES)
    start = min((dataclasses.replace(job, recompute=choices) for choices in alike), key=floor)
    mix = min_peak_strategies(start)
    best = _descended(start, cache(lambda job: _needs(job, mix)), changed)
    return min(best, recompute_steps(job, mix)[-1], key=floor)


def recompute_steps(job: Job, mix: tuple[Strategy, ...]) -> list[Job]:
    """Return the job with more and more recomputation, from none. Each frees most in the slots that need most, per
    second.

    Needs are those of the sequential schedule of ``mix``, and estimated: :func:`mdcs.plan.job.peak_changes` add up.
    """
    profile, plain = job.profile, dataclasses.replace(job, recompute=())
    needs = np.array(_needs(plain, mix).by_slot, float) + job.reserve
    places = np.array([slot.place for slot in job.period.slots])

    def change(each: RecomputeOption) -> np.ndarray:
        by_place = np.zeros(len(profile.slots))
        for s, size in peak_changes(profile, each).items():
            by_place[s] = size
        return by_place[places]

    changes = {each: change(each) for each in profile.recompute}
    chosen: dict[int, RecomputeOption] = {}
    steps, lowest = [plain], needs.max()
    while True:
        weights = (np.maximum(needs, 0) / needs.max()) ** _SHARPNESS
        worth = {}  # weighted bytes freed per second added, beyond what the unit does already
        for each in profile.recompute:
            before = chosen.get(each.unit)
            if before is None or each.freed > before.freed:
                freed = -(changes[each] - (changes[before] if before else 0.0)) @ weights
                worth[each] = float(freed) / max(each.seconds - (before.seconds if before else 0.0), 1e-9)
        best = max(worth, key=worth.__getitem__, default=None)
        if best is None or worth[best] <= 0:
            break
        needs = needs + changes[best] - (changes[chosen[best.unit]] if best.unit in chosen else 0.0)
        chosen[best.unit] = best
        if needs.max() < lowest:
            lowest = needs.max()
            choices = tuple(chosen[u].choice if u in chosen else NONE for u in range(len(profile.units)))
            steps.append(dataclasses.replace(job, recompute=choices))
    return steps
