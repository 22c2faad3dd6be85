"""The JSON file of an exported plan: calls of fully_shard, and features that FSDP2 lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mdcs.export.groups import (
    Group,
    PrefetchLists,
    fsdp2_strategy,
    fused_with,
    groups_of,
    in_order,
    modules_of,
    prefetch_distance,
    prefetch_lists,
)
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE

SCHEMA = 3

KEYS = {
    "ranks": "ranks that the plan is for; meshes have as many",
    "groups": "calls of torch.distributed.fsdp.fully_shard, in this order: inner modules before those around them",
    "groups.modules": "names for model.get_submodule; several are one call with a list; '' is the model itself",
    "groups.units": "of the plan, for messages",
    "groups.elements": "of the modules' parameters that no group before has, padding included; another number is "
    "another model",
    "groups.mesh": "its shape, of ranks in their order: all of them, or replicas x shards, with names for both "
    "dimensions",
    "groups.reshard_after_forward": "argument of fully_shard",
    "groups.recompute": "modules to wrap in checkpoint_wrapper before any fully_shard, and what they keep until "
    "backward; full: inputs; selective: outputs of matrix products and attention, too",
    "groups.forward_prefetch": "first modules of groups, for set_modules_to_forward_prefetch; empty: leave it",
    "groups.backward_prefetch": "first modules of groups, for set_modules_to_backward_prefetch; empty: leave it",
    "lost": "what the plan does and FSDP2 cannot, with the units; no units: the whole plan",
}


_AHEAD = 1
"""Groups that FSDP2 gathers ahead by itself."""


def document(plan: Plan, forward: PrefetchLists | None = None, backward: PrefetchLists | None = None) -> dict[str, Any]:
    """Return plain containers for JSON, with everything that :func:`mdcs.export.fsdp2.apply_plan` needs.

    ``forward``, ``backward``: what each group prefetches; None: at most one group, and no further ahead than the plan.
    """
    groups = groups_of(plan)
    forward = prefetch_lists(plan, groups, Kind.AG_F, _AHEAD) if forward is None else forward
    backward = prefetch_lists(plan, groups, Kind.AG_B, _AHEAD) if backward is None else backward
    lists = {Kind.AG_F: forward, Kind.AG_B: backward}
    return {
        "schema": SCHEMA,
        "about": "how torch's fully_shard (FSDP2, torch >= 2.6) comes nearest to a plan of mdcs; docs/export.md has "
        "a loader",
        "plan": plan.hash,
        "ranks": plan.world,
        "groups": [_group(plan, g, forward, backward) for g in groups],
        "lost": [{"what": what, "units": units} for what, units in limitations(plan, groups, lists).items()],
        "keys": KEYS,
    }


def _group(plan: Plan, group: Group, forward: PrefetchLists, backward: PrefetchLists) -> dict[str, Any]:
    units = [plan.profile.units[u] for u in group.units]

    def recomputes(unit: int) -> bool:
        return bool(plan.recompute) and plan.recompute[unit] != NONE

    return {
        "modules": list(group.modules),
        "units": [unit.name for unit in units],
        "strategy": str(group.strategy),
        "elements": sum(unit.numel for unit in units),
        "mesh": list(group.mesh(plan.profile)),
        "reshard_after_forward": group.reshard_after_forward,
        "recompute": {name: plan.recompute[u] for u in group.units if recomputes(u) for name in modules_of(plan, u)},
        "forward_prefetch": list(forward.get(group.name, ())),
        "backward_prefetch": list(backward.get(group.name, ())),
    }


def limitations(plan: Plan, groups: tuple[Group, ...], lists: Mapping[Kind, PrefetchLists]) -> dict[str, list[str]]:
    """Return sentences that say what FSDP2 lacks -> names of the units that lose it. No units: the whole plan."""
    found: dict[str, list[str]] = {}
    for unit, what in _limitations_by_unit(plan, groups, lists):
        units = found.setdefault(what, [])
        if plan.profile.units[unit].name not in units:
            units.append(plan.profile.units[unit].name)
    if plan.budget is not None:
        found[
            "has a byte budget that is enforced while it runs; FSDP2 has none: its peak is what its calls come to"
        ] = []
    if plan.cross_iteration:
        found[
            "updates a unit as soon as it is reduced, beside backward and the next forward; FSDP2 updates all of them "
            "in optimizer.step(), after backward, and gathers nothing before it"
        ] = []
    if any(unit.master_dtype for unit in plan.profile.units):
        found[
            "has float32 masters: keep the model in float32 and give fully_shard (or apply_plan) a MixedPrecisionPolicy"
            " with param_dtype, and with reduce_dtype where gradients are summed in another type"
        ] = []
    return found


def _limitations_by_unit(
    plan: Plan, groups: tuple[Group, ...], lists: Mapping[Kind, PrefetchLists]
) -> Iterator[tuple[int, str]]:
    together = fused_with(plan)
    ahead = {kind: prefetch_distance(plan, groups, kind) for kind in (Kind.AG_F, Kind.AG_B)}
    of = {u: g for g in groups for u in g.units}
    for u, strategy in enumerate(plan.strategies):
        g, own = of[u], [m for m in plan.messages if m.micro == 0 and any(v == u for v, _ in m.parts)]
        if strategy is Strategy.zero2 and g.strategy is Strategy.sdp:
            yield u, (
                "zero2 becomes sdp (reshard_after_forward=False): the same bytes are sent; whole parameters are held "
                "from forward to backward, not between steps, and are gathered right before their use"
            )
        elif fsdp2_strategy(strategy) is not g.strategy:
            yield u, f"{strategy} becomes {g.strategy}, that of the largest unit in its fully_shard group"
        if g.strategy is Strategy.dp:
            yield (
                u,
                "dp is fully_shard on a mesh of shape (ranks, 1), with a second copy of parameters while they are used",
            )
        uses = sum(s.unit == u and s.phase == "F" for s in plan.profile.slots)
        if g.strategy.regathers and uses > len(modules_of(plan, u)):
            yield u, "is used several times in a forward pass; FSDP2 gathers it for each of them"
        for kind in Kind:
            if sum(m.kind is kind for m in own) > 1:
                yield u, f"is sent in parts ({kind}); FSDP2 sends it whole"
            if together.get((kind, u), {u}) - {*g.units}:
                yield u, f"shares messages ({kind}) with units that FSDP2 sends by themselves"
        late = [m.slot > plan.period.window(Op(m.kind, u, 0))[0] for m in own if not m.kind.is_gather]
        if late and all(late):
            yield u, "is reduced later than its gradients are there, behind other messages; FSDP2 reduces it at once"
        if any(m.kind.plain is Kind.AG_F and m.slot < plan.period.turn for m in own):
            yield u, "is gathered for the next step while backward runs; FSDP2 begins to gather with the forward pass"
        for kind, ahead_of in lists.items():
            order = [each.name for each in in_order(groups, kind)]
            by = next((name for name, targets in ahead_of.items() if g.name in targets), g.name)
            if g.name in order and ahead[kind].get(g.name, 0) > order.index(g.name) - order.index(by):
                yield (
                    u,
                    f"is gathered further ahead ({kind}) in the plan, which is not faster here or takes too many bytes",
                )


def describe_group(group: Mapping[str, Any]) -> str:
    """Return a group of the file in words, for messages."""
    units = group["units"]
    return f"unit {', '.join(units)}" if units else "the whole model"
