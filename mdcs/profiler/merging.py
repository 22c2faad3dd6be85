"""One profile of several: of all ranks, or of example batches (memory of the largest, time of the mix)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace

from mdcs.profile.layout import WholeParameter
from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import INPUTS, Profile, Slot, Unit
from mdcs.profiler.consensus import all_gather_object
from mdcs.runtime.slots import from_words


def order(profile: Profile) -> list[tuple[int, str]]:
    """Return unit and phase of each slot."""
    return [(slot.unit, slot.phase) for slot in profile.slots]


def _uses(profile: Profile) -> Iterator[tuple[tuple[int, str, int], Slot]]:
    """Yield the slots with what they are, whatever their order is: unit, phase, and how often the unit came before."""
    seen = Counter[tuple[int, str]]()
    for slot, key in zip(profile.slots, order(profile), strict=True):
        yield (*key, seen[key]), slot
        seen[key] += 1


def _slots(base: Profile, profiles: Sequence[Profile], seconds: Callable[[list[float]], float]) -> tuple[Slot, ...]:
    """Return the slots of ``base`` with the most bytes of all profiles, and what ``seconds`` makes of their times."""
    by_use, out = [dict(_uses(p)) for p in profiles], []
    for use, slot in _uses(base):
        found = [slots_of[use] for slots_of in by_use if use in slots_of]
        live, peak = max(s.live for s in found), max(s.peak for s in found)
        out.append(replace(slot, seconds=seconds([s.seconds for s in found]), live=live, peak=peak))
    return tuple(out)


# ---- ranks


def merge_profiles(profile: Profile) -> Profile:
    """Return one profile of all ranks' profiles. Collective.

    It has the median rank's times, the spread over all ranks, the largest bytes, and all uses. Where ranks took
    different branches, its slots are those of the rank that came to most of them.
    """
    profiles = all_gather_object(profile)
    first = max(profiles, key=lambda p: sum(slot.seconds > 0 for slot in p.slots))
    alike = [p for p in profiles if order(p) == order(first)]
    spread = {}
    for name in first.spread:
        found = [p.spread[name] for p in alike if name in p.spread]
        spread[name] = min(low for low, _ in found), max(high for _, high in found)
    host_s = statistics.median(p.execution.host_seconds_per_message for p in profiles)
    return replace(
        first, units=tuple(map(_merge_units, zip(*(p.units for p in alike), strict=True))),
        slots=_slots(first, profiles, statistics.median), spread=spread,
        recompute=_merge_options(profiles) if len(alike) == len(profiles) else (),
        execution=replace(first.execution, host_seconds_per_message=host_s),
    )  # fmt: skip


def _merge_options(profiles: Sequence[Profile]) -> tuple[RecomputeOption, ...]:
    """Return the options that every rank has, in the same slots, with the fewest bytes freed and the highest peaks."""
    found = [{(option.unit, option.choice): option.uses for option in p.recompute} for p in profiles]
    out = []
    for unit, choice in found[0]:
        versions = [options[unit, choice] for options in found if (unit, choice) in options]
        slots = {tuple((use.forward, use.backward) for use in of_rank) for of_rank in versions}
        if len(versions) == len(profiles) and len(slots) == 1:
            out.append(RecomputeOption(unit, choice, tuple(map(_merge_uses, zip(*versions, strict=True)))))
    return tuple(out)


def _merge_uses(versions: Sequence[RecomputeUse]) -> RecomputeUse:
    return replace(
        versions[0],
        freed=min(use.freed for use in versions),
        seconds=statistics.median(use.seconds for use in versions),
        peak=max(use.peak for use in versions),
        forward_peak=max(use.forward_peak for use in versions),
    )


def _merge_units(versions: Sequence[Unit]) -> Unit:
    """Return the first rank's unit, in use from the first to the last slot in which any rank uses it."""
    first = versions[0]
    backward = [u.backward for u in versions if u.backward is not None]
    return replace(
        first,
        forward=_span([u.forward for u in versions]),
        backward=_span(backward) if backward else None,
        whole=tuple(map(_slowest, zip(*(u.whole for u in versions), strict=True))),
        gradients=first.gradients if all(u.gradients and u.backward == first.backward for u in versions) else (),
        aliased=any(u.aliased for u in versions),
    )


def _slowest(versions: Sequence[WholeParameter]) -> WholeParameter:
    """Return the parameter with the slowest rank's update, and the most bytes."""
    return WholeParameter(*map(max, zip(*map(astuple, versions), strict=True)))


def _span(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


# ---- batches


def mix(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of a loop that draws these batches equally often: by slot mean seconds and most bytes.

    Slots are those of the :func:`largest` batch. What only other batches use is a departure from them. Recomputation is
    that of the largest batch, too, with seconds in proportion to the slot's.
    """
    base = profiles[largest(profiles)]
    slots = _slots(base, profiles, lambda found: sum(found) / len(profiles))
    inputs = max((p.about.get(INPUTS, "") for p in profiles), key=lambda words: math.prod(from_words(words) or (0,)))
    backward = zip(base.slots[base.forward_slots :], slots[base.forward_slots :], strict=True)
    scales = [after.seconds / before.seconds if before.seconds else 1.0 for before, after in backward]
    return replace(
        base, slots=slots, about=base.about | ({INPUTS: inputs} if inputs else {}),
        recompute=tuple(_scaled(option, scales) for option in base.recompute),
    )  # fmt: skip


def largest(profiles: Sequence[Profile]) -> int:
    """Return the number of the batch that needs the most memory, of equal ones the slowest."""

    def size(p: Profile) -> tuple[bool, int, float]:
        return bool(p.recompute), max(slot.peak for slot in p.slots), total_s(p)  # recomputation: it was the largest

    return max(range(len(profiles)), key=lambda i: size(profiles[i]))


def _scaled(option: RecomputeOption, scales: Sequence[float]) -> RecomputeOption:
    """Return the option with the seconds of each use times the scale of its backward slot."""
    uses = (replace(use, seconds=use.seconds * scales[use.backward]) for use in option.uses)
    return replace(option, uses=tuple(uses))


def typical(profiles: Sequence[Profile]) -> int:
    """Return the number of the batch whose passes take nearest to the mean time."""
    seconds = [total_s(p) for p in profiles]
    mean = sum(seconds) / len(seconds)
    return min(range(len(seconds)), key=lambda i: abs(seconds[i] - mean))


def with_slots_of(measured: Profile, before: Profile, mixed: Profile) -> Profile:
    """Return what was ``measured`` from ``before`` on, of one batch, with the slots of the mix, scaled alike."""
    scale = total_s(measured) / total_s(before) if total_s(before) else 1.0
    slots = tuple(replace(slot, seconds=scale * slot.seconds) for slot in mixed.slots)
    recompute = tuple(_scaled(option, [scale] * mixed.backward_slots) for option in mixed.recompute)
    return replace(measured, slots=slots, units=mixed.units, about=mixed.about, recompute=recompute)


def total_s(profile: Profile) -> float:
    """Return the seconds of all slots."""
    return sum(slot.seconds for slot in profile.slots)
