"""The floor of a job: the mix whose sequential schedule has the smallest peak, and the recomputation that lowers it most.

All fsdp holds least at rest. But a slot that uses an fsdp unit holds the whole unit in addition to its shard, whereas
zero2 and dp hold only the whole unit. If one large unit makes the peak, that unit is better whole. The peak of a mix is
not a sum over units, so the mix is found by a search. The search starts from uniform mixes and changes the units at
work in the slot of the peak.
"""

from __future__ import annotations

import dataclasses
from functools import cache, lru_cache

import numpy as np

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.recompute import peak_changes
from mdcs.plan.strategy import Strategy, choices
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.worst_case import worst_case_bytes_by_slot
from mdcs.planner.schedulers.sequential import sequential
from mdcs.profile.recompute import CHOICES, NONE, RecomputeOption, uniform

_MOST = 400  # sequential schedules tried
_SHARPNESS = 24  # power of a slot's bytes, relative to the peak: how little slots below the peak count


@lru_cache(maxsize=64)
def min_peak_strategies(job: Job) -> tuple[Strategy, ...]:
    """Return the strategies with the smallest sequential peak found: all fsdp unless other mixes need fewer bytes.

    No uniform mix needs fewer bytes. On random jobs of up to four units the result is the minimum over all mixes
    (tests). With many units it is the result of a search of some hundred schedules at most, the same in every process.
    """

    @cache
    def judged(mix: tuple[Strategy, ...]) -> tuple[int, int, Plan]:
        """Return the peak, its first slot, and the sequential schedule."""
        plan = sequential(StrategyAssignment(job, mix))
        by_slot = [need.bytes for need in worst_case_bytes_by_slot(plan)]
        return max(by_slot), by_slot.index(max(by_slot)), plan

    def peak(mix: tuple[Strategy, ...]) -> int:
        return judged(mix)[0]

    def descended(mix: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the mix after changes of one unit at a time, as long as they lower its peak."""
        while judged.cache_info().currsize < _MOST:
            _, slot, plan = judged(mix)
            changes = [(u, k) for u in _at_work(plan, slot) for k in choices(job.profile) if k is not mix[u]]
            best = min(((*mix[:u], k, *mix[u + 1 :]) for u, k in changes), key=peak, default=mix)
            if peak(best) >= peak(mix):
                break
            mix = best
        return mix

    alike = [(strategy,) * len(job.profile.units) for strategy in (Strategy.fsdp, *choices(job.profile))]
    starts = alike[0], min(alike, key=peak)
    return min(map(descended, starts), key=peak)  # ties: all fsdp, the first start


@lru_cache(maxsize=64)
def min_peak_job(job: Job) -> Job:
    """Return the job with the recomputation of the smallest sequential peak found, with the strategies that need least.

    The search starts from the uniform choices, and changes the choice of units at work in the slot of the peak. The last of
    the :func:`recompute_steps` is tried, too.
    """
    known = {(option.unit, option.choice) for option in job.profile.recompute}
    alike = dict.fromkeys(uniform(job.profile.recompute, len(job.profile.units), choice) for choice in CHOICES)
    jobs = [dataclasses.replace(job, recompute=choices) for choices in alike]
    best = min(jobs, key=_peak)
    mix = min_peak_strategies(best)
    needs, plan = _needs(best, mix)
    for _ in range(_MOST // 4):
        now = best.recompute or (NONE,) * len(mix)
        at_work = _at_work(plan, needs.index(max(needs)))
        changes = [(u, c) for u in at_work for c in CHOICES if c != now[u] and (c == NONE or (u, c) in known)]
        found = [dataclasses.replace(best, recompute=(*now[:u], c, *now[u + 1 :])) for u, c in changes]
        lower = min(((*_needs(each, mix), each) for each in found), key=lambda each: max(each[0]), default=None)
        if lower is None or max(lower[0]) >= max(needs):
            break
        needs, plan, best = lower
    return min(best, recompute_steps(job, mix)[-1], key=_peak)


def _peak(job: Job) -> int:
    """Return the floor of a job whose recomputation is decided, without its reserve."""
    return max(_needs(job, min_peak_strategies(job))[0])


def _needs(job: Job, mix: tuple[Strategy, ...]) -> tuple[list[int], Plan]:
    """Return the bytes that each slot of the mix's sequential schedule needs, and the schedule."""
    plan = sequential(StrategyAssignment(job, mix))
    return [need.bytes for need in worst_case_bytes_by_slot(plan)], plan


def recompute_steps(job: Job, mix: tuple[Strategy, ...]) -> list[Job]:
    """Return the job with more and more recomputation, from none. Each frees most in the slots that need most, per second.

    Needs are those of the sequential schedule of ``mix``, and estimated: :func:`mdcs.plan.recompute.peak_changes` add up.
    """
    profile, plain = job.profile, dataclasses.replace(job, recompute=())
    needs = np.array(_needs(plain, mix)[0], float) + job.reserve
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
