"""The smallest peak of a job, mixes judged by their sequential schedule, and the error for an infeasible budget.

The floor is the smallest peak found over strategies and recomputation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdcs.plan.job import Job, peak_changes
from mdcs.plan.ledger import worst_case_bytes_by_slot
from mdcs.plan.period import Strategy, choices
from mdcs.plan.plan import Plan
from mdcs.planner.schedulers import StrategyAssignment, sequential
from mdcs.profile.recompute import CHOICES, NONE, RecomputeOption, uniform
from mdcs.profile.schema import Profile
from mdcs.sizes import GIB, MIB, Budget

_MOST = 400  # sequential schedules that are tried
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
        for u, micro in itertools.product(range(len(self.plan.profile.units)), range(period.micro_steps)):
            for span in (period.forward(u, micro), period.backward(u, micro)):
                if span is not None and (slot - span[0]) % period.length <= span[1] - span[0]:
                    found.add(u)
        return sorted(found)


def _needs(job: Job, mix: tuple[Strategy, ...]) -> _Needs:
    plan = sequential(StrategyAssignment(job, mix))
    return _Needs(worst_case_bytes_by_slot(plan), plan)


def _descended(start: _T, needs: Callable[[_T], _Needs], changed: Callable[[_T, int], list[_T]]) -> _T:
    """Return ``start`` after changes (``changed``) of one unit at the peak at a time, while they lower the peak."""
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

    The minimum over all mixes if there are at most 400. With more it is the result of a search, the same in every
    process, and no uniform mix needs fewer bytes.
    """
    needs = cache(partial(_needs, job))

    def peak(mix: tuple[Strategy, ...]) -> int:
        return needs(mix).peak

    def changed(mix: tuple[Strategy, ...], u: int) -> list[tuple[Strategy, ...]]:
        return [(*mix[:u], k, *mix[u + 1 :]) for k in kinds if k is not mix[u]]

    kinds = sorted(choices(job.profile), key=lambda k: k is not Strategy.fsdp)  # of equals min returns the first
    count = len(job.profile.units)
    if len(kinds) ** count <= _MOST:
        return min(itertools.product(kinds, repeat=count), key=peak)
    alike = [(kind,) * count for kind in kinds]
    starts = alike[0], min(alike, key=peak)
    return min((_descended(each, needs, changed) for each in starts), key=peak)


@lru_cache(maxsize=64)
def min_peak_job(job: Job) -> Job:
    """Return the job with the recomputation of the smallest sequential peak found, with the strategies that need least.

    The search starts from the uniform choices. The last of the :func:`recompute_steps` is tried, too.
    """
    known = {(option.unit, option.choice) for option in job.profile.recompute}

    def changed(job: Job, u: int) -> list[Job]:
        now = job.recompute or (NONE,) * len(job.profile.units)
        found = [c for c in CHOICES if c != now[u] and (c == NONE or (u, c) in known)]
        return [job.with_recompute((*now[:u], c, *now[u + 1 :])) for c in found]

    def floor(job: Job) -> int:
        """Return the floor of a job whose recomputation is decided, without its reserve."""
        return _needs(job, min_peak_strategies(job)).peak

    alike = dict.fromkeys(uniform(job.profile.recompute, len(job.profile.units), choice) for choice in CHOICES)
    start = min(map(job.with_recompute, alike), key=floor)
    mix = min_peak_strategies(start)
    best = _descended(start, cache(lambda job: _needs(job, mix)), changed)
    return min(best, recompute_steps(job, mix)[-1], key=floor)


def recompute_steps(job: Job, mix: tuple[Strategy, ...]) -> list[Job]:
    """Return the job with more and more recomputation, from none. Each frees most per second where most is needed.

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
            steps.append(job.with_recompute(choices))
    return steps


class StrategyDecision(NamedTuple):
    """A strategy per unit.

    - ``outcome``: status of the solver. Empty if no solver was used.
    - ``recompute``: a choice of recomputation per unit. None: those of the problem's job.
    """

    strategies: tuple[Strategy, ...]
    outcome: str = ""
    recompute: tuple[str, ...] | None = None


class InfeasibleBudget(ValueError):
    """Error: no plan fits the budget.

    - ``budget``: bytes.
    - ``smallest``: the smallest feasible budget (bytes). None: no budget is feasible.
    - ``what``: the part of the plan that does not fit.
    - ``is_bound``: the model has not been measured. ``smallest`` is then a lower bound: every plan needs more.
    - ``recomputed``: the smallest feasible budget with recomputation (bytes), where that is smaller.
    """

    def __init__(
        self, budget: int, smallest: int | None, what: str, is_bound: bool = False, recomputed: int | None = None
    ) -> None:
        self.budget, self.smallest, self.what = budget, smallest, what
        self.is_bound, self.recomputed = is_bound, recomputed
        super().__init__(f"{what} does not fit {budget} bytes: {self._enough(_in_bytes)}")

    def _enough(self, words: Callable[[int], str]) -> str:
        """Return which budget would be enough, in these words for bytes."""
        if self.smallest is None:
            return "no budget is enough"
        least = "every plan needs more than" if self.is_bound else "the smallest budget is"
        more = "" if self.recomputed is None else f", with recomputation {words(self.recomputed)}"
        return f"{least} {words(self.smallest)}{more}"

    def __reduce__(self) -> tuple[Any, ...]:  # rank 0 sends its error to all ranks
        values = self.budget, self.smallest, self.what, self.is_bound, self.recomputed
        return type(self), values, {"args": self.args}

    def in_words_of(self, asked: Budget, ddp: Callable[[], int], before: str = "") -> InfeasibleBudget:
        """Return the error as it is said to somebody who typed this budget: in per cent of DDP, or in MiB.

        - ``ddp``: returns the bytes that DDP needs. ``before``: begins the message: the key of a config.
        """
        if asked.of_ddp is None:
            said = f"{self.what} does not fit {_in_words(self.budget)}; {self._enough(_in_words)}"
        else:
            whole = ddp()
            enough = self._enough(lambda size: f"{math.ceil(100 * size / whole)} %")
            said = f"{100 * asked.of_ddp:g} % of DDP's {_in_words(whole)} is {_in_words(self.budget)}; {enough}"
        error = InfeasibleBudget(self.budget, self.smallest, self.what, self.is_bound, self.recomputed)
        error.args = (before + said,)
        return error


def _in_bytes(size: int) -> str:
    return f"{size} bytes ({math.ceil(size / GIB * 1e4) / 1e4:g} GiB)"


def _in_words(size: int) -> str:
    """Return bytes in MiB, or small ones in KiB, rounded up: a budget of so many is enough."""
    unit, name = (MIB, "MiB") if size >= MIB else (1 << 10, "KiB")
    return f"{math.ceil(10 * size / unit) / 10:.1f} {name}"


@dataclass(frozen=True)
class PlanningProblem:
    """Judges mixes of one job within ``budget`` bytes (reserve included; None: unlimited).

    - ``recomputes``: the plan decides which units recompute their activations. The recomputation of the job is then a
      start, with which mixes are judged. The floor is that of the recomputation with the smallest peak.
    """

    job: Job
    budget: int | None
    recomputes: bool = False

    @property
    def profile(self) -> Profile:
        """The profile of the job, with the slots of its recomputation."""
        return self.job.period.profile

    @property
    def admissible(self) -> int | None:
        """Bytes of the budget beside the reserve. None: unlimited."""
        return None if self.budget is None else self.budget - self.job.reserve

    def decided(self, recompute: Sequence[str] | None = None) -> PlanningProblem:
        """Return the problem with these choices of recomputation, which stay. None: those of the job."""
        if recompute is None or tuple(recompute) == self.job.recompute:
            return dataclasses.replace(self, recomputes=False)
        return PlanningProblem(self.job.with_recompute(recompute), self.budget)

    def mix(self, strategies: Sequence[Strategy]) -> StrategyAssignment:
        """Return the mix of these strategies, one per unit."""
        return StrategyAssignment(self.job, tuple(strategies))

    def sequential_needs(self, strategies: Sequence[Strategy]) -> list[int]:
        """Return the bytes that each slot of the sequential schedule of a mix needs, reserve included."""
        return [need + self.job.reserve for need in worst_case_bytes_by_slot(sequential(self.mix(strategies)))]

    def peak(self, strategies: Sequence[Strategy]) -> int:
        """Return the bytes that the sequential schedule of a mix needs, reserve included."""
        return max(self.sequential_needs(strategies))

    def seconds(self, strategies: Sequence[Strategy]) -> float:
        """Return the seconds of a sequential step without those of compute: of communication, sums and updates."""
        return sum(self.job.cost.unit_s(u, k, self.job.micro_steps) for u, k in enumerate(strategies))

    @property
    def floor(self) -> int:
        """Smallest feasible peak (bytes): the sequential peak of the :func:`min_peak_strategies` mix."""
        if self.recomputes:
            return PlanningProblem(min_peak_job(dataclasses.replace(self.job, recompute=())), None).floor
        return self.peak(min_peak_strategies(self.job))

    def starts(self) -> list[tuple[Strategy, ...]]:
        """Return the mixes to start a search from: the leanest mix, then all fsdp if it fits and differs.

        Raises InfeasibleBudget, with the floor, if the budget is below the floor.
        """
        mix, all_fsdp = min_peak_strategies(self.job), (Strategy.fsdp,) * len(self.profile.units)
        each = [f"{n} {k}" for k, n in Counter(map(str, mix)).items()]
        self.require(mix, f"even all {mix[0]}" if len(each) == 1 else f"even the leanest mix ({', '.join(each)})")
        return [mix] if mix == all_fsdp or not self.fits(all_fsdp) else [mix, all_fsdp]

    def fits(self, strategies: Sequence[Strategy]) -> bool:
        """Return whether the sequential schedule of a mix is within the budget."""
        return self.budget is None or self.peak(strategies) <= self.budget

    def require(self, strategies: Sequence[Strategy], what: str) -> None:
        """Raise InfeasibleBudget unless the mix fits. The error names ``what`` and the bytes that the mix needs."""
        if self.budget is not None and not self.fits(strategies):
            raise InfeasibleBudget(self.budget, self.peak(strategies), what)
