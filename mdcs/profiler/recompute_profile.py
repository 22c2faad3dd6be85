"""Measure what units free, and what it costs, if they compute their activations again.

The model runs twice more: all units that can free their activations keep only their inputs, then also the outputs of
matrix products. The numbers of each unit are differences to the run in which all activations were kept.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Generator, Sequence

from torch import nn

from mdcs.model.recompute import reasons_to_keep
from mdcs.model.units import ModelUnit
from mdcs.profile.recompute import FULL, NONE, REASONS, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile
from mdcs.profiler.slot_recorder import SlotRecorder

Choice = dict[int, bool]
"""Units that compute their activations again, and whether they keep the outputs of matrix products."""
Options = tuple[tuple[RecomputeOption, ...], dict[str, str]]
"""The options of all units that free something, and for ``Profile.about`` why others have none."""


def recomputation(
    model: nn.Module, units: Sequence[ModelUnit], base: SlotRecorder
) -> Generator[Choice, SlotRecorder | str, Options]:
    """Ask for passes in which units recompute; return the options.

    ``base``: the passes in which all activations were kept. To be sent: the passes, or why the units cannot.
    """
    reasons = reasons_to_keep(model, units)
    for u, unit in enumerate(units):
        if not reasons[u]:
            reasons[u] = _reason(base, u, unit)
    options: list[RecomputeOption] = []
    for choice in (FULL, SELECTIVE):
        able = [u for u, reason in enumerate(reasons) if not reason]
        found = yield from _attempt(base, able, choice)
        if isinstance(found, str):
            # Some unit cannot: find out which, one at a time.
            alone = {}
            for u in able:
                alone[u] = yield from _attempt(base, [u], choice)
            for u, result in alone.items():
                if isinstance(result, str) and choice == FULL:
                    reasons[u] = result.removeprefix(f"{units[u].name}: ")
            able = [u for u, result in alone.items() if not isinstance(result, str)]
            found = yield from _attempt(base, able, choice)
        if able and not isinstance(found, str):
            base.keep(max(0, found.live[0] - base.live[0]))
            options += _options(base, found, able, choice)
    with_options = {option.unit for option in options}
    kept = [f"{units[u].name}: {reasons[u] or 'frees nothing'}" for u in range(len(units)) if u not in with_options]
    return tuple(options), {REASONS: "; ".join(kept)} if kept else {}


def _reason(base: SlotRecorder, u: int, unit: ModelUnit) -> str:
    """Return why a unit keeps its activations, as the passes show; "" if it need not."""
    if (u, "F") not in base.spans or (u, "B") not in base.spans:
        return "no gradient flows through it"
    if u in base.aliased:
        return "its parameters are used outside of it"
    if u in base.changing:
        return "its forward changes a buffer, so it cannot be computed again with the same result"
    if any(m in base.rerun for m in unit.modules[0].modules()):
        return "the model checkpoints it already"
    return ""


def _attempt(
    base: SlotRecorder, able: Sequence[int], choice: str
) -> Generator[Choice, SlotRecorder | str, SlotRecorder | str]:
    """Return the passes in which these units compute again, or why they cannot."""
    found = yield dict.fromkeys(able, choice == SELECTIVE)
    return found if isinstance(found, str) or found.order == base.order else "its slots come in another order"


def _options(base: SlotRecorder, found: SlotRecorder, able: Sequence[int], choice: str) -> list[RecomputeOption]:
    forward_slots = sum(phase == "F" for _, phase in base.order)
    less = [before - now for before, now in zip(base.live, found.live, strict=True)]
    after = [*less[1:], 0]
    uses = defaultdict[int, list[RecomputeUse]](list)
    early = {use: after[use[1]] - less[use[1]] for use in found.recomputations if use[0] in able}
    freed: dict[tuple[int, int, int], int] = {}  # negative: units that keep more, as the random state does
    # the last backward first: few units are still to come
    for use in sorted(early, key=lambda use: use[2], reverse=True):
        unit, forward, backward = use
        others = [other for other in freed if other[1] < backward <= other[2]]
        at_start = less[backward] - sum(freed[other] for other in others)
        late = less[backward] - after[backward]  # none: what came free in its forward is another unit's output
        freed[use] = min(early[use] - base.shared.get(unit, 0), at_start if late > 0 else late)
        # Its output, which the next unit keeps until its own backward is over, and nobody after that.
        output = less[backward] - early[use] - sum(early[other] for other in others)
        output = min(max(0, output), base.outputs.get(unit, 0))
        uses[unit].append(
            RecomputeUse(
                forward, backward - forward_slots, max(0, freed[use]), statistics.median(found.recomputations[use]),
                peak=max(0, found.peak[backward] - found.live[backward] - output),
                # Others free bytes in this slot, too.
                forward_peak=found.peak[forward] - base.peak[forward] + less[forward],
            )
        )  # fmt: skip
    return [
        RecomputeOption(u, choice, tuple(sorted(uses[u], key=lambda use: use.forward)))
        for u in able
        if any(use.freed for use in uses[u])
    ]


def with_recomputation(profile: Profile, choice: dict[int, bool]) -> tuple[Profile, tuple[str, ...]]:
    """Return the profile in which these units may recompute, as far as anybody knows for nothing; the choice of each.
    """
    forward = [slot.unit for slot in profile.slots if slot.phase == "F"]
    backward = [slot.unit for slot in profile.slots if slot.phase == "B"]
    options = []
    for u, selective in choice.items():
        starts = [slot for slot, unit in enumerate(forward) if unit == u]
        ends = [slot for slot, unit in enumerate(backward) if unit == u][::-1]
        uses = tuple(RecomputeUse(f, b, 0, 0.0, 0) for f, b in zip(starts, ends, strict=False))
        options.append(RecomputeOption(u, SELECTIVE if selective else FULL, uses))
    chosen = {option.unit: option.choice for option in options}
    return dataclasses.replace(profile, recompute=tuple(options)), tuple(
        chosen.get(u, NONE) for u in range(len(profile.units))
    )


def estimated(profile: Profile, able: Sequence[int], outputs: dict[int, int]) -> tuple[RecomputeOption, ...]:
    """Return full recomputation as the slots of ``profile`` tell it, for a model that takes another path in each step.

    A unit frees what its forward has added, but for its ``outputs`` (bytes), which the next unit keeps; it computes as
    long as its forward, and then holds again what it has freed.
    """
    forward = [(slot, i) for i, slot in enumerate(profile.slots) if slot.phase == "F"]
    backward = [slot for slot in profile.slots if slot.phase == "B"]
    options = []
    for u in able:
        starts = [(f, i) for f, (slot, i) in enumerate(forward) if slot.unit == u]
        ends = [b for b, slot in enumerate(backward) if slot.unit == u][::-1]
        uses = []
        for (f, i), b in zip(starts, ends, strict=False):
            freed = max(0, profile.slots[i + 1].live - profile.slots[i].live - outputs.get(u, 0))
            peak = max(0, backward[b].peak - backward[b].live) + freed
            uses.append(RecomputeUse(f, b, freed, profile.slots[i].seconds, peak))
        if any(use.freed for use in uses):
            options.append(RecomputeOption(u, FULL, tuple(uses)))
    return tuple(options)
