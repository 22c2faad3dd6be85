"""What planners are judged by: the peak of a mix with the sequential schedule; and the error for a budget that nothing fits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.plan.job import Job
from mdcs.plan.ledger import needs, smallest_budget
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy
from mdcs.planner.leanest import leanest
from mdcs.profile.contents import Profile
from mdcs.sizes import GIB


class InfeasibleBudget(ValueError):
    """What was to be planned does not fit ``budget`` bytes; ``smallest`` is the smallest feasible budget, None if none is.

    ``is_bound``: the model has not been measured, and ``smallest`` is what no plan needs less than.
    """

    def __init__(self, budget: int, smallest: int | None, what: str, is_bound: bool = False) -> None:
        feasible = "no budget is enough"
        if smallest is not None:
            feasible = "every plan needs more than" if is_bound else "the smallest feasible budget is"
            feasible += f" {smallest} bytes ({math.ceil(smallest / GIB * 1e4) / 1e4:g} GiB)"
        super().__init__(f"{what} does not fit {budget} bytes: {feasible}")
        self.budget, self.smallest, self.what, self.is_bound = budget, smallest, what, is_bound

    def __reduce__(self) -> tuple[type, tuple[int, int | None, str, bool]]:  # rank 0's goes to all ranks
        return type(self), (self.budget, self.smallest, self.what, self.is_bound)


@dataclass(frozen=True)
class Judge:
    """Judges mixes of one job within ``budget`` bytes, its reserve included; None is unlimited."""

    job: Job
    budget: int | None

    @property
    def profile(self) -> Profile:
        """That of the job."""
        return self.job.profile

    def mix(self, strategies: Sequence[Strategy]) -> Mix:
        """The mix of these strategies, one per unit."""
        return Mix(self.job, tuple(strategies))

    def sequential(self, strategies: Sequence[Strategy]) -> Plan:
        """The sequential schedule of a mix."""
        return sequential(self.mix(strategies))

    def peak(self, strategies: Sequence[Strategy]) -> int:
        """Bytes that the sequential schedule of a mix needs, reserve included."""
        return smallest_budget(self.sequential(strategies))

    def sequential_needs(self, strategies: Sequence[Strategy]) -> list[int]:
        """Bytes that each slot of the sequential schedule of a mix needs, reserve included; :meth:`peak` is their largest."""
        return [need.bytes + self.job.reserve for need in needs(self.sequential(strategies))]

    def seconds(self, strategies: Sequence[Strategy]) -> float:
        """Communication, sums and updates of a mix in one iteration, none of it hidden: a sequential step less its compute."""
        return sum(self.job.cost.unit_s(u, k, self.job.micro_steps) for u, k in enumerate(strategies))

    @property
    def floor(self) -> int:
        """Smallest feasible peak in bytes: that of the :func:`~mdcs.planner.leanest.leanest` mix, sequential schedule."""
        return self.peak(leanest(self.job))

    def starts(self) -> list[tuple[Strategy, ...]]:
        """Mixes to start from: the floor's, and all fsdp where that fits. Raises InfeasibleBudget, with the floor, for less."""
        mix, all_fsdp = leanest(self.job), (Strategy.fsdp,) * len(self.profile.units)
        counts = Counter(map(str, mix))
        said = f"all {mix[0]}" if len(counts) == 1 else f"the leanest mix ({', '.join(f'{n} {k}' for k, n in counts.items())})"
        self.require(mix, f"even {said}")
        return [mix] if mix == all_fsdp or not self.fits(all_fsdp) else [mix, all_fsdp]

    def fits(self, strategies: Sequence[Strategy]) -> bool:
        """Whether the sequential schedule of a mix is within the budget."""
        return self.budget is None or self.peak(strategies) <= self.budget

    def require(self, strategies: Sequence[Strategy], what: str) -> None:
        """Raise InfeasibleBudget unless the mix fits; the error names what ``what`` itself would need."""
        if self.budget is not None and not self.fits(strategies):
            raise InfeasibleBudget(self.budget, self.peak(strategies), what)
