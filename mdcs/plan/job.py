"""The job: profile and training settings that a plan is made for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdcs.plan.cost import CostModel
from mdcs.plan.period import Period
from mdcs.profile.schema import Profile


@dataclass(frozen=True)
class Job:
    """A profile, and the settings of its steps.

    - ``micro_steps``: forward and backward passes of one iteration.
    - ``cross_iteration``: whether messages may cross from one iteration to the next. False (with gradient clipping, for
      example): all updates wait for all reductions of the iteration.
    - ``reserve``: bytes of any budget that are kept free.

    All plans of a job share its :class:`~mdcs.plan.period.Period` and its cost model. Raises ValueError for numbers out
    of range.
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
        """Return the job itself, or a job with default settings for a profile."""
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
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # without cached properties
