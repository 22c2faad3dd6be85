"""The job that a plan is made for: a profile, settings, and the slots of a step in which some units compute activations
again. A unit's recomputation runs at the start of its backward slot, so gradients become ready later in it.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mdcs.plan.cost import CostModel
from mdcs.plan.period import Period
from mdcs.profile.recompute import NONE, RecomputeOption
from mdcs.profile.schema import Profile, Unit


@dataclass(frozen=True)
class Job:
    """A profile, and the settings of its steps. Its plans share its :class:`~mdcs.plan.period.Period` and cost model.

    - ``micro_steps``: forward and backward passes of one iteration.
    - ``cross_iteration``: whether messages may cross from one iteration to the next. False (with gradient clipping, for
      example): all updates wait for all reductions of the iteration.
    - ``reserve``: bytes of any budget that are kept free.
    - ``recompute``: by unit none, full or selective (:mod:`mdcs.profile.recompute`). Empty: none for all. ``profile``
      has the slots without recomputation, ``period.profile`` those with it.

    Raises ValueError for numbers out of range, and for a recomputation that the profile has no option for.
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
        chosen_options(self.profile, self.recompute)

    @classmethod
    def of(cls, job: Job | Profile) -> Job:
        """Return the job itself, or a job with default settings for a profile."""
        return cls(job) if isinstance(job, Profile) else job

    def with_recompute(self, choices: Sequence[str]) -> Job:
        """Return the job with these choices of recomputation. None for all units becomes empty."""
        return dataclasses.replace(self, recompute=() if set(choices) <= {NONE} else tuple(choices))

    @cached_property
    def period(self) -> Period:
        """The circle of slots of one iteration, with the profile that has the slots of ``recompute``."""
        return Period(recomputing(self.profile, self.recompute), self.micro_steps, not self.cross_iteration)

    @cached_property
    def cost(self) -> CostModel:
        """Seconds of messages and updates."""
        return CostModel(self.profile)

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # without cached properties


def chosen_options(profile: Profile, choices: Sequence[str]) -> tuple[RecomputeOption, ...]:
    """Return the options of these choices, one per unit or none at all. Raises ValueError where one has no option."""
    if not choices:
        return ()
    if len(choices) != len(profile.units):
        raise ValueError(f"{len(choices)} choices of recomputation for {len(profile.units)} units")
    options = {(option.unit, option.choice): option for option in profile.recompute}
    for u, choice in enumerate(choices):
        if choice != NONE and (u, choice) not in options:
            raise ValueError(f"the profile has no recomputation {choice!r} for unit {profile.units[u].name}")
    return tuple(options[u, choice] for u, choice in enumerate(choices) if choice != NONE)


def recomputing(profile: Profile, choices: Sequence[str]) -> Profile:
    """Return the profile with the slots and the gradient times of these choices. Raises as :func:`chosen_options`."""
    options = chosen_options(profile, choices)
    if not options:
        return profile
    first = profile.forward_slots
    freed, grown = [0] * len(profile.slots), [0.0] * len(profile.slots)
    peaks: dict[int, int] = defaultdict(int)
    higher = [0] * len(profile.slots)
    for option in options:
        for use in option.uses:
            backward = first + use.backward
            for s in range(use.forward + 1, backward + 1):
                freed[s] += use.freed
            grown[backward] += use.seconds
            higher[use.forward] += use.forward_peak
            peaks[backward] = max(peaks[backward], use.peak)
    slots = []
    for s, slot in enumerate(profile.slots):
        live = max(0, slot.live - freed[s])
        peak = live + peaks[s] if s in peaks else max(live, slot.peak - freed[s] + higher[s])
        slots.append(dataclasses.replace(slot, seconds=slot.seconds + grown[s], live=live, peak=peak))
    units = tuple(_later(unit, profile, grown) for unit in profile.units)
    return dataclasses.replace(profile, units=units, slots=tuple(slots))


def peak_changes(profile: Profile, option: RecomputeOption) -> dict[int, int]:
    """Return slot -> bytes by which its peak changes when only this unit recomputes. Changes of several units add up,
    except where several recompute in one slot.
    """
    first, out = profile.forward_slots, dict[int, int]()
    for use in option.uses:
        backward = first + use.backward
        out[use.forward] = out.get(use.forward, 0) + use.forward_peak
        for s in range(use.forward + 1, backward):
            out[s] = out.get(s, 0) - use.freed
    for use in option.uses:
        backward = first + use.backward
        freed = sum(each.freed for each in option.uses if each.forward < backward <= first + each.backward)
        out[backward] = profile.slots[backward].live - freed + use.peak - profile.slots[backward].peak
    return {s: size for s, size in out.items() if size}


def _later(unit: Unit, profile: Profile, grown: Sequence[float]) -> Unit:
    """Return the unit, whose gradients become ready later in a slot that recomputes first."""
    if unit.backward is None or not unit.gradients:
        return unit
    last = profile.forward_slots + unit.backward[1]
    if not grown[last]:
        return unit
    before, seconds = grown[last], profile.slots[last].seconds
    gradients = tuple((n, min(1.0, (before + part * seconds) / (before + seconds))) for n, part in unit.gradients)
    return dataclasses.replace(unit, gradients=gradients)
