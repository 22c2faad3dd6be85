"""The JSON file of an exported plan: calls of fully_shard, features that FSDP2 lacks, the predicted step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mdcs.export.groups import Group, groups_of
from mdcs.export.lost import lost, megatron
from mdcs.export.predicted import Steps, best_steps, fitting
from mdcs.plan.messages import Plan

SCHEMA = 2

KEYS = {
    "ranks": "ranks that the plan is for; meshes have as many",
    "groups": "calls of torch.distributed.fsdp.fully_shard, in this order: inner modules before those around them",
    "groups.modules": "names for model.get_submodule; several are one call with a list; '' is the model itself",
    "groups.units": "of the plan, for messages",
    "groups.elements": "of the parameters in the modules that no group before has; another number is another model",
    "groups.mesh": "its shape, of ranks in their order: all of them, or replicas x shards, with names for both dimensions",
    "groups.reshard_after_forward": "argument of fully_shard",
    "groups.forward_prefetch": "first modules of groups, for set_modules_to_forward_prefetch; empty: leave it",
    "groups.backward_prefetch": "first modules of groups, for set_modules_to_backward_prefetch; empty: leave it",
    "lost": "what the plan does and FSDP2 cannot, with the units; no units: the whole plan",
    "predicted": "seconds of a step and bytes per rank: of the plan run by mdcs, and of these calls run by FSDP2",
    "budget": "bytes per rank that the plan keeps with mdcs, its reserve included; null: it has none",
    "budget.fits": "whether these calls are predicted to keep it with FSDP2, which enforces nothing",
    "budget.would_fit": "units to be fsdp (reshard_after_forward) instead so that it is kept, with that step; null: none needed, "
    "or too little",
    "budget.least": "the step with all units fsdp, where not even that keeps it; else null",
    "megatron_fsdp": "the nearest mode of Megatron-FSDP",
}


def document(plan: Plan) -> dict[str, Any]:
    """Return plain containers for JSON, with everything that :func:`mdcs.export.fsdp2.apply_plan` needs."""
    groups = groups_of(plan)
    chosen = best_steps(plan, groups)
    return {
        "schema": SCHEMA,
        "about": "how torch's fully_shard (FSDP2, torch >= 2.6) comes nearest to a plan of mdcs; docs/export.md has a loader",
        "plan": plan.hash,
        "ranks": plan.world,
        "groups": [_group(plan, g, chosen) for g in groups],
        "lost": [{"what": each.what, "units": list(each.units)} for each in lost(plan, groups, chosen.forward, chosen.backward)],
        "predicted": {
            "mdcs": None if plan.prediction is None else dataclasses.asdict(plan.prediction),
            "fsdp2": dataclasses.asdict(chosen.prediction),
        },
        "budget": _budget(plan, groups),
        "megatron_fsdp": megatron(plan),
        "keys": KEYS,
    }


def _budget(plan: Plan, groups: tuple[Group, ...]) -> dict[str, Any] | None:
    if plan.budget is None:
        return None
    found = fitting(plan, groups)
    other = None if found is None else {"units": list(found.units), **dataclasses.asdict(found.prediction)}
    return {
        "bytes": plan.budget, "reserve": plan.reserve, "fits": found is None,
        "would_fit": other if found is not None and found.fits else None,
        "least": other if found is not None and not found.fits else None,
    }  # fmt: skip


def _group(plan: Plan, group: Group, chosen: Steps) -> dict[str, Any]:
    units = [plan.profile.units[u] for u in group.units]
    return {
        "modules": list(group.modules),
        "units": [unit.name for unit in units],
        "strategy": str(group.strategy),
        "elements": sum(unit.numel for unit in units),
        "mesh": list(group.mesh(plan.profile)),
        "reshard_after_forward": group.reshard_after_forward,
        "forward_prefetch": list(chosen.forward.get(group.name, ())),
        "backward_prefetch": list(chosen.backward.get(group.name, ())),
    }


def named(group: Mapping[str, Any]) -> str:
    """Return a group of the file in words, for messages."""
    units = group["units"]
    return f"unit {', '.join(units)}" if units else "the whole model"
