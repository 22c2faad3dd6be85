"""Judgement of mixes by the peak of their sequential schedule, and the error for an infeasible budget."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.worst_case import min_feasible_budget, worst_case_bytes_by_slot
from mdcs.planner.memory_floor import min_peak_job, min_peak_strategies
from mdcs.planner.schedulers.sequential import sequential
from mdcs.profile.schema import Profile
from mdcs.sizes import GIB, MIB, Budget


class StrategyDecision(NamedTuple):
    """A strategy per unit.

    - ``outcome``: status of the solver. Empty if no solver was used.
    - ``recompute``: a choice of recomputation per unit. None: those of the problem's job.
    """

    strategies: tuple[Strategy, ...]
    outcome: str = ""
    recompute: tuple[str, ...] | None = None


class InfeasibleBudget(ValueError):
    """No plan fits the budget.

    - ``budget``: bytes.
    - ``smallest``: the smallest feasible budget (bytes). None: no budget is feasible.
    - ``what``: the part of the plan that does not fit.
    - ``is_bound``: the model has not been measured. ``smallest`` is then a lower bound: every plan needs more.
    - ``recomputed``: the smallest feasible budget with recomputation (bytes), where that is smaller.
    - ``said``: the message, where it is not the one in bytes (:meth:`in_words_of`).
    """

    def __init__(
        self,
        budget: int,
        smallest: int | None,
        what: str,
        is_bound: bool = False,
        recomputed: int | None = None,
        said: str = "",
    ) -> None:
        feasible = "no budget is enough"
        if smallest is not None:
            feasible = "every plan needs more than" if is_bound else "the smallest feasible budget is"
            feasible += f" {smallest} bytes ({math.ceil(smallest / GIB * 1e4) / 1e4:g} GiB)"
        if recomputed is not None:
            feasible += f", with recompute=planned {recomputed}"
        super().__init__(said or f"{what} does not fit {budget} bytes: {feasible}")
        self.budget, self.smallest, self.what, self.is_bound, self.recomputed = (
            budget,
            smallest,
            what,
            is_bound,
            recomputed,
        )

    def __reduce__(self) -> tuple[Any, ...]:  # rank 0 sends its error to all ranks
        return type(self), (self.budget, self.smallest, self.what, self.is_bound, self.recomputed, str(self))

    def in_words_of(self, asked: Budget, ddp: Callable[[], int], before: str = "") -> InfeasibleBudget:
        """Return the error as it is said to somebody who typed this budget: in per cent of DDP, or in MiB.

        - ``ddp``: returns the bytes that DDP needs.
        - ``before``: begins the message: the key of a config.
        """
        if asked.of_ddp is not None:
            whole = ddp()
            said = f"{100 * asked.of_ddp:g} % of DDP's {_in_words(whole)} is {_in_words(self.budget)}; "

            def least(size: int) -> str:
                return f"{math.ceil(100 * size / whole)} %"
        else:
            said, least = f"{self.what} does not fit {_in_words(self.budget)}; ", _in_words

        if self.smallest is None:
            said += "no budget is enough"
        else:
            said += (
                f"{'every plan needs more than' if self.is_bound else 'the smallest budget is'} {least(self.smallest)}"
            )
        if self.recomputed is not None:
            said += f", with recomputation {least(self.recomputed)}"
        return InfeasibleBudget(self.budget, self.smallest, self.what, self.is_bound, self.recomputed, before + said)


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
        return self.job.planned_profile

    @property
    def admissible(self) -> int | None:
        """Bytes of the budget beside the reserve. None: unlimited."""
        return None if self.budget is None else self.budget - self.job.reserve

    def decided(self, recompute: Sequence[str] | None = None) -> PlanningProblem:
        """Return the problem with these choices of recomputation, which stay. None: those of the job."""
        if recompute is None or tuple(recompute) == self.job.recompute:
            return dataclasses.replace(self, recomputes=False)
        return PlanningProblem(dataclasses.replace(self.job, recompute=tuple(recompute)), self.budget)

    def mix(self, strategies: Sequence[Strategy]) -> StrategyAssignment:
        """Return the mix of these strategies, one per unit."""
        return StrategyAssignment(self.job, tuple(strategies))

    def sequential(self, strategies: Sequence[Strategy]) -> Plan:
        """Return the sequential schedule of a mix."""
        return sequential(self.mix(strategies))

    def peak(self, strategies: Sequence[Strategy]) -> int:
        """Return the bytes that the sequential schedule of a mix needs, reserve included."""
        return min_feasible_budget(self.sequential(strategies))

    def sequential_needs(self, strategies: Sequence[Strategy]) -> list[int]:
        """Return the bytes that each slot of the sequential schedule needs, reserve included.

        :meth:`peak` is the largest.
        """
        return [need.bytes + self.job.reserve for need in worst_case_bytes_by_slot(self.sequential(strategies))]

    def seconds(self, strategies: Sequence[Strategy]) -> float:
        """Return the seconds of communication, sums and updates in one iteration without overlap.

        This is the sequential step minus compute.
        """
        return sum(self.job.cost.unit_s(u, k, self.job.micro_steps) for u, k in enumerate(strategies))

    @property
    def floor(self) -> int:
        """Smallest feasible peak (bytes): the sequential peak of the
        :func:`~mdcs.planner.memory_floor.min_peak_strategies` mix.
        """
        if self.recomputes:
            return PlanningProblem(min_peak_job(dataclasses.replace(self.job, recompute=())), None).floor
        return self.peak(min_peak_strategies(self.job))

    def starts(self) -> list[tuple[Strategy, ...]]:
        """Return the mixes to start a search from: the leanest mix, then all fsdp if it fits and differs.

        Raises InfeasibleBudget, with the floor, if the budget is below the floor.
        """
        mix, all_fsdp = min_peak_strategies(self.job), (Strategy.fsdp,) * len(self.profile.units)
        counts = Counter(map(str, mix))
        said = (
            f"all {mix[0]}"
            if len(counts) == 1
            else f"the leanest mix ({', '.join(f'{n} {k}' for k, n in counts.items())})"
        )
        self.require(mix, f"even {said}")
        return [mix] if mix == all_fsdp or not self.fits(all_fsdp) else [mix, all_fsdp]

    def fits(self, strategies: Sequence[Strategy]) -> bool:
        """Whether the sequential schedule of a mix is within the budget."""
        return self.budget is None or self.peak(strategies) <= self.budget

    def require(self, strategies: Sequence[Strategy], what: str) -> None:
        """Raise InfeasibleBudget unless the mix fits. The error names ``what`` and the bytes that the mix needs."""
        if self.budget is not None and not self.fits(strategies):
            raise InfeasibleBudget(self.budget, self.peak(strategies), what)
