"""One profile of several example batches: memory of the largest, time of the mix."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mdcs.profile.recompute import RecomputeOption
from mdcs.profile.schema import INPUTS, Profile, Slot
from mdcs.runtime.slots import from_words

Use = tuple[int, str, int]
"""Unit, phase, and how often the unit came before in this phase."""


def mix(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of a loop that draws these batches equally often: by slot mean seconds and most bytes.

    Slots are those of the :func:`largest` batch. What only other batches use is a departure from them. Recomputation is
    that of the largest batch, too, with seconds in proportion to the slot's.
    """
    base = profiles[largest(profiles)]
    by_use = [dict(uses(p.slots)) for p in profiles]
    slots = []
    for use, slot in uses(base.slots):
        found = [slots_of[use] for slots_of in by_use if use in slots_of]
        slots.append(
            dataclasses.replace(
                slot,
                seconds=sum(s.seconds for s in found) / len(profiles),
                live=max(s.live for s in found),
                peak=max(s.peak for s in found),
            )
        )
    inputs = max((p.about.get(INPUTS, "") for p in profiles), key=lambda words: math.prod(from_words(words) or (0,)))
    backward = zip(base.slots[base.forward_slots :], slots[base.forward_slots :], strict=True)
    scales = [after.seconds / before.seconds if before.seconds else 1.0 for before, after in backward]
    return dataclasses.replace(
        base, slots=tuple(slots), about=base.about | ({INPUTS: inputs} if inputs else {}),
        recompute=tuple(_scaled(option, scales) for option in base.recompute),
    )  # fmt: skip


def largest(profiles: Sequence[Profile]) -> int:
    """Return the number of the batch that needs the most memory, of equal ones the slowest: one with recomputation was
    it."""
    numbers = range(len(profiles))
    return max(numbers, key=lambda i: (bool(profiles[i].recompute), _peak(profiles[i]), total_s(profiles[i])))


def _peak(profile: Profile) -> int:
    return max(slot.peak for slot in profile.slots)


def _scaled(option: RecomputeOption, scales: Sequence[float]) -> RecomputeOption:
    """Return the option with the seconds of each use times the scale of its backward slot."""
    uses = (dataclasses.replace(use, seconds=use.seconds * scales[use.backward]) for use in option.uses)
    return dataclasses.replace(option, uses=tuple(uses))


def typical(profiles: Sequence[Profile]) -> int:
    """Return the number of the batch whose passes take nearest to the mean time."""
    seconds = [total_s(p) for p in profiles]
    mean = sum(seconds) / len(seconds)
    return min(range(len(seconds)), key=lambda i: abs(seconds[i] - mean))


def with_slots_of(measured: Profile, before: Profile, mixed: Profile) -> Profile:
    """Return what was ``measured`` from ``before`` on, the profile of one batch, with the slots of the mix, scaled
    alike."""
    scale = total_s(measured) / total_s(before) if total_s(before) else 1.0
    slots = tuple(dataclasses.replace(slot, seconds=scale * slot.seconds) for slot in mixed.slots)
    recompute = tuple(_scaled(option, [scale] * mixed.backward_slots) for option in mixed.recompute)
    return dataclasses.replace(measured, slots=slots, units=mixed.units, about=mixed.about, recompute=recompute)


def total_s(profile: Profile) -> float:
    """Return the seconds of all slots."""
    return sum(slot.seconds for slot in profile.slots)


def uses(slots: Sequence[Slot]) -> Iterator[tuple[Use, Slot]]:
    """Yield the slots with what they are, whatever their order is."""
    seen: Counter[tuple[int, str]] = Counter()
    for slot in slots:
        key = slot.unit, slot.phase
        yield (*key, seen[key]), slot
        seen[key] += 1
