"""Measure what units free, and what it costs, if they compute their activations again.

The model runs twice more: all units that can free their activations keep only their inputs, then also the outputs of
matrix products. The numbers of each unit are differences to the run in which all activations were kept.
"""

from __future__ import annotations

import gc
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import nn

from mdcs.model.recompute import reasons_to_keep
from mdcs.model.units import ModelUnit
from mdcs.profile.recompute import FULL, REASONS, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profiler.slot_recorder import SlotRecorder


def measure_recomputation(
    model: nn.Module, units: Sequence[ModelUnit], base: SlotRecorder, record: Callable[..., SlotRecorder]
) -> tuple[tuple[RecomputeOption, ...], dict[str, str]]:
    """Return the options of all units that free something, and for ``Profile.about`` why others have none.

    - ``base``: the passes in which all activations were kept.
    - ``record``: measures passes. ``selective`` says which units compute again, and whether they keep matrix products.
    """
    reasons = reasons_to_keep(model, units)
    for u, unit in enumerate(units):
        if not reasons[u]:
            reasons[u] = _reason(base, u, unit)
    options: list[RecomputeOption] = []
    for choice in (FULL, SELECTIVE):
        able = [u for u, reason in enumerate(reasons) if not reason]
        found = _attempt(record, base, able, choice)
        if isinstance(found, str):
            # Some unit cannot: find out which, one at a time.
            alone = {u: _attempt(record, base, [u], choice, iterations=1, warmup=0) for u in able}
            for u, result in alone.items():
                if isinstance(result, str) and choice == FULL:
                    reasons[u] = result.removeprefix(f"{units[u].name}: ")
            able = [u for u, result in alone.items() if not isinstance(result, str)]
            found = _attempt(record, base, able, choice)
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
    if any(m in base.rerun for m in unit.modules[0].modules()):
        return "the model checkpoints it already"
    return ""


def _attempt(
    record: Callable[..., SlotRecorder], base: SlotRecorder, able: Sequence[int], choice: str, **passes: int
) -> SlotRecorder | str:
    """Return the passes in which these units compute again, or why they cannot."""
    try:
        found = record(selective=dict.fromkeys(able, choice == SELECTIVE), **passes)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    else:
        return found if found.order == base.order else "its slots come in another order"
    gc.collect()  # the error's frames hold gradients and activations in cycles, which would count in the next passes
    return reason


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
