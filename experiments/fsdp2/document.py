"""The exported file with what is predicted of FSDP2: the fastest prefetch within the budget, step, memory, and the
budget."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.fsdp2.step_prediction import best_steps, fit_to_budget
from mdcs.export.document import Group, document, groups_of
from mdcs.plan.plan import Plan

KEYS = {
    "predicted": "seconds of a step and bytes per rank: of the plan run by mdcs, and of these calls run by FSDP2",
    "budget": "bytes per rank that the plan keeps with mdcs, its reserve included; null: it has none",
    "budget.fits": "whether these calls are predicted to keep it with FSDP2, which enforces nothing",
    "budget.would_fit": "units to be fsdp (reshard_after_forward) instead so that it is kept, with that step; "
    "null: none needed, or too little",
    "budget.least": "the step with all units fsdp, where not even that keeps it; else null",
}


def predicted_document(plan: Plan) -> dict[str, Any]:
    """Return :func:`mdcs.export.document.document` with the fastest prefetch that is predicted, and the predictions."""
    groups = groups_of(plan)
    chosen = best_steps(plan, groups)
    made = document(plan, chosen.forward, chosen.backward)
    return made | {
        "predicted": {
            "mdcs": None if plan.prediction is None else dataclasses.asdict(plan.prediction),
            "fsdp2": dataclasses.asdict(chosen.prediction),
        },
        "budget": _budget(plan, groups),
        "keys": made["keys"] | KEYS,
    }


def _budget(plan: Plan, groups: tuple[Group, ...]) -> dict[str, Any] | None:
    if plan.budget is None:
        return None
    units, steps = fit_to_budget(plan, groups)
    other = {"units": units, **dataclasses.asdict(steps.prediction)} if units else None
    fits = steps.fit(plan)
    return {
        "bytes": plan.budget, "reserve": plan.reserve, "fits": fits and not units,
        "would_fit": other if fits else None, "least": None if fits else other,
    }  # fmt: skip
