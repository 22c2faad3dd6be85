"""The job: profile and training settings that a plan is made for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdcs.plan.cost import CostModel
from mdcs.plan.period import Period
from mdcs.plan.recompute import chosen_options, recomputing
from mdcs.profile.recompute import NONE
from mdcs.profile.schema import Profile


@dataclass(frozen=True)
class Job:
    """A profile, and the settings of its steps.

    - ``micro_steps``: forward and backward passes of one iteration.
    - ``cross_iteration``: whether messages may cross from one iteration to the next. False (with gradient clipping, for
      example): all updates wait for all reductions of the iteration.
    - ``reserve``: bytes of any budget that are kept free.
    - ``recompute``: for each unit what it does with its activations: none (it keeps them), full or selective
      (:mod:`mdcs.profile.recompute`). Empty: all units keep theirs. None for all units becomes empty.

    The slots of ``profile`` are measured without recomputation. Those of ``period`` and ``planned_profile`` are with it.
    All plans of a job share its :class:`~mdcs.plan.period.Period` and its cost model. Raises ValueError for numbers out
    of range, and for a recomputation that the profile has no option for.
    """

    profile: Profile
    micro_steps: int = 1
    cross_iteration: bool = True
    reserve: int = 0
    recompute: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.micro_steps < 1:
            raise ValueError(f"micro_steps must be >= 1, got {self.micro_steps}")
        if self.reserve < 0:
            raise ValueError(f"reserve must be >= 0 bytes, got {self.reserve}")
        if all(choice == NONE for choice in self.recompute) and len(self.recompute) == len(self.profile.units):
            object.__setattr__(self, "recompute", ())
        chosen_options(self.profile, self.recompute)

    @classmethod
    def of(cls, job: Job | Profile) -> Job:
        """Return the job itself, or a job with default settings for a profile."""
        return cls(job) if isinstance(job, Profile) else job

    @property
    def planned_profile(self) -> Profile:
        """The profile with the slots of ``recompute``."""
        return self.period.profile

    @cached_property
    def period(self) -> Period:
        """The circle of slots of one iteration."""
        return Period(recomputing(self.profile, self.recompute), self.micro_steps, not self.cross_iteration)

    @cached_property
    def cost(self) -> CostModel:
        """Seconds of messages and updates."""
        return CostModel(self.profile)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # without cached properties
