"""Slots of a step in which some units compute their activations again.

A unit's recomputation runs at the start of its backward slot: the slot takes longer, and gradients become ready later in
it. Between the unit's forward and its backward it holds fewer bytes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from mdcs.profile.recompute import NONE, RecomputeOption
from mdcs.profile.schema import Profile, Unit


def chosen_options(profile: Profile, choices: Sequence[str]) -> tuple[RecomputeOption, ...]:
    """Return the options of these choices, one choice per unit. Empty: none.

    Raises ValueError for another number of choices, and for a choice that the profile has no option for.
    """
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
    """Return the profile with the slots and the gradient times of these choices, one per unit.

    Raises ValueError as :func:`chosen_options` does.
    """
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
    """Return by how many bytes the peak of each slot changes when only this unit recomputes, for slots that change.

    The changes of several units add up, except in a slot in which several units recompute.
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
