"""Rounding of fractional solutions of the slot model: strategies by error diffusion, windows by thresholds.

The relaxation mixes strategies within a unit, about alike in similar units. Rounded one by one, all such units would
get the same strategy. Therefore the bytes by which rounding raises a strategy are subtracted from the strategy in the
following units (Floyd, Steinberg, 1976, in one dimension), and so are the bytes that recomputation frees. A buffer is
held from the slot by which a given fraction of its gather has been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mdcs.plan.strategy import Strategy
from mdcs.planner.ilp.slot_model import SlotDecision, SlotModel
from mdcs.profile.recompute import NONE

Mix = tuple[tuple[Strategy, ...], tuple[str, ...]]
"""A strategy per unit, and a choice of recomputation per unit (empty: none is open)."""

# Factors on the shares of strategies other than fsdp: whole buffers need more bytes than fractions of buffers.
_KEPT = (0.94, 0.98, 0.92, 0.96, 0.9, 1.0, 0.93, 0.97, 0.95, 0.88, 0.85)
_KEPT_RECOMPUTING = (0.85, 0.9, 0.8, 0.95, 0.82, 0.92, 0.87, 0.75, 0.97, 0.78, 0.94, 0.7)
_FREED = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2)  # factors on bytes that recomputation frees
_SENT = (0.5, 0.4, 0.6)  # fraction of a gather from which its buffer is held


def roundings(model: SlotModel, values: Sequence[float]) -> Iterator[SlotDecision]:
    """Yield decisions near a solution of the relaxed model, the most promising first. They may exceed the budget."""
    for sent in _SENT:
        for strategies, recompute in mixes(model, values):
            yield model.decide(values, strategies, sent, recompute)


def mixes(model: SlotModel, values: Sequence[float]) -> list[Mix]:
    """Return mixes near a solution of the relaxed model, the most promising first."""
    kept = _KEPT_RECOMPUTING if model.recompute.columns else _KEPT
    return list(dict.fromkeys(_with_recompute(model, values, _diffused(model, values, each)) for each in kept))


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


def _with_recompute(model: SlotModel, values: Sequence[float], strategies: tuple[Strategy, ...]) -> Mix:
    """Return the strategies with the choices that free least and with which they fit the budget, or that free most."""
    recompute: tuple[str, ...] = ()
    for more in _FREED if model.recompute.columns else ():
        recompute = _recomputed(model, values, more)
        if model.problem.decided(recompute).fits(strategies):
            break
    return strategies, recompute


def _recomputed(model: SlotModel, values: Sequence[float], more: float) -> tuple[str, ...]:
    """Return choices that free about ``more`` times the bytes of the solution: what one unit lacks, the next ones free.
    """
    out, owed = [NONE] * len(model.profile.units), 0.0
    for u in range(len(out)):
        own = {option: x for option, x in model.recompute.columns.items() if option.unit == u}
        if own:
            owed += more * sum(values[x] * option.freed for option, x in own.items())
            freed = {NONE: 0, **{option.choice: option.freed for option in own}}
            out[u] = min(freed, key=lambda choice: abs(freed[choice] - owed))
            owed -= freed[out[u]]
    return tuple(out)
