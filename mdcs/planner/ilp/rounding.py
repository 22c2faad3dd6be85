"""Rounding of fractional solutions of the slot model: strategies by error diffusion, windows by thresholds.

The relaxation mixes strategies within a unit, about alike in similar units. Rounded one by one, all such units would
get the same strategy. Therefore the bytes by which rounding raises a strategy are subtracted from the strategy in the
following units (Floyd, Steinberg, 1976, in one dimension). A buffer is held from the slot by which a given fraction of
its gather has been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdcs.plan.strategy import Strategy
from mdcs.planner.ilp.slot_model import SlotDecision, SlotModel

# Factors on the shares of strategies other than fsdp: whole buffers need more bytes than fractions of buffers.
_KEPT = (0.94, 0.98, 0.92, 0.96, 0.9, 1.0, 0.93, 0.97, 0.95, 0.88, 0.85)
_SENT = (0.5, 0.4, 0.6)  # fraction of a gather from which its buffer is held


def roundings(model: SlotModel, values: Sequence[float]) -> Iterator[SlotDecision]:
    """Yield decisions near a solution of the relaxed model, the most promising first. They may exceed the budget."""
    mixes = dict.fromkeys(_diffused(model, values, kept) for kept in _KEPT)
    for sent in _SENT:
        for strategies in mixes:
            yield model.decide(values, strategies, sent)


def _diffused(model: SlotModel, values: Sequence[float], kept: float) -> tuple[Strategy, ...]:
    owed = dict.fromkeys(Strategy, 0.0)
    out = []
    for unit, z in zip(model.profile.units, model.assign, strict=True):
        shares = {k: values[x] * (kept if k is not Strategy.fsdp and Strategy.fsdp in z else 1.0) for k, x in z.items()}
        if Strategy.fsdp in z:
            shares[Strategy.fsdp] += 1 - sum(shares.values())
        for k, share in shares.items():
            owed[k] += share * unit.numel
        chosen = max(shares, key=owed.__getitem__)
        owed[chosen] -= unit.numel
        out.append(chosen)
    return tuple(out)
