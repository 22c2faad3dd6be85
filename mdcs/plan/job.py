"""The job: what a plan is made for, beside strategies, messages and budget."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdcs.plan.cost import CostModel
from mdcs.plan.period import Period
from mdcs.profile.contents import Profile


@dataclass(frozen=True)
class Job:
    """A profile, and how its steps are taken.

    An iteration has ``micro_steps`` forward and backward passes. Without ``cross_iteration`` (with clipping, say) all updates
    wait for all reductions of the iteration. ``reserve`` bytes of any budget are kept free. Raises ValueError for numbers out of
    range. All plans of a job share its :class:`~mdcs.plan.period.Period` and its cost model.
    """

    profile: Profile
    micro_steps: int = 1
    cross_iteration: bool = True
    reserve: int = 0

    def __post_init__(self) -> None:
        if self.micro_steps < 1:
            raise ValueError(f"micro_steps must be >= 1, got {self.micro_steps}")
        if self.reserve < 0:
            raise ValueError(f"reserve must be >= 0 bytes, got {self.reserve}")

    @classmethod
    def of(cls, job: Job | Profile) -> Job:
        """The job itself, or that of a profile whose steps are plain ones."""
        return cls(job) if isinstance(job, Profile) else job

    @cached_property
    def period(self) -> Period:
        """The circle of slots of one iteration."""
        return Period(self.profile, self.micro_steps)

    @cached_property
    def cost(self) -> CostModel:
        """Seconds of messages and updates."""
        return CostModel(self.profile)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # not what was worked out from it
