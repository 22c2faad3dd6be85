"""The JSON file of an exported plan: calls of fully_shard.

A group is one call: modules that are gathered and reduced together, with the groups that it prefetches. A unit becomes
a group of its own. Units that share a module, and neighbours whose every message the plan fuses, become one group.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE

SCHEMA = 3


def document(plan: Plan) -> dict[str, Any]:
    """Return plain containers for JSON, with everything that :func:`mdcs.export.fsdp2.apply_plan` needs."""
    groups = groups_of(plan)
    forward, backward = (prefetch_lists(plan, groups, kind) for kind in (Kind.AG_F, Kind.AG_B))
    return {
        "schema": SCHEMA,
        "about": "how torch's fully_shard (FSDP2, torch >= 2.6) comes nearest to a plan of mdcs; docs/export.md has "
        "a loader",
        "plan": plan.hash,
        "ranks": plan.world,
        "groups": [_describe(plan, g, forward, backward) for g in groups],
    }


def _describe(
    plan: Plan, group: Group, forward: Mapping[str, list[str]], backward: Mapping[str, list[str]]
) -> dict[str, Any]:
    units = [plan.profile.units[u] for u in group.units]
    shards = group.strategy.parts(plan.profile)
    again = [(u, plan.recompute[u]) for u in group.units if plan.recompute and plan.recompute[u] != NONE]
    return {
        "modules": list(group.modules),
        "units": [unit.name for unit in units],
        "strategy": str(group.strategy),
        "elements": sum(unit.numel for unit in units),
        # [ranks], or [replicas, shards] where several ranks keep the same shard.
        "mesh": [shards] if shards == plan.world and not group.replicated else [plan.world // shards, shards],
        # A replicated group frees its second copy, which costs no message.
        "reshard_after_forward": group.strategy.regathers or group.replicated,
        "recompute": {name: choice for u, choice in again for name in modules_of(plan, u)},
        "forward_prefetch": forward.get(group.name, []),
        "backward_prefetch": backward.get(group.name, []),
    }


# ---- groups

Span = tuple[int, int]
"""(first, last) slot, counted in the forward or in the backward slots of a micro-step."""


@dataclass(frozen=True)
class Group:
    """One call of fully_shard.

    - ``modules``: names; "" is the model itself.
    - ``units``: indices; empty for a group that only contains other groups.
    - ``forward``, ``backward``: the slots in which FSDP2 counts the group as in use, slots of modules inside it
      included.
    """

    modules: tuple[str, ...]
    units: tuple[int, ...]
    strategy: Strategy
    forward: Span
    backward: Span | None

    @property
    def name(self) -> str:
        """Name of its first module; "" for the model."""
        return self.modules[0]

    @property
    def replicated(self) -> bool:
        """Return whether each rank keeps the whole group: its mesh has one shard, and its gradients are all-reduced."""
        return self.strategy is Strategy.dp


def modules_of(plan: Plan, unit: int) -> tuple[str, ...]:
    """Return the names of a unit's modules, taken from the name that :func:`mdcs.partition` gave the unit."""
    names = [u.modules for u in plan.profile.units]
    inside = any(name.startswith("model.") for name in names)  # then "model" is a module of that name
    return tuple("" if part == "model" and not inside else part for part in names[unit].split("+"))


def groups_of(plan: Plan) -> tuple[Group, ...]:
    """Return the groups in the order in which fully_shard must be called: inner modules first, the model last."""
    members: list[set[int]] = []
    members_of: dict[str, set[int]] = {}
    for u in range(len(plan.profile.units)):
        modules = modules_of(plan, u)
        joined = {u}.union(*(members_of[m] for m in modules if m in members_of))
        members = [m for m in members if not m & joined] + [joined]
        members_of.update((m, joined) for v in joined for m in modules_of(plan, v))
    groups = _fused(plan, [_group(plan, sorted(m)) for m in members])
    if not any("" in g.modules for g in groups):
        whole = (0, plan.profile.forward_slots - 1)
        groups.append(Group(("",), (), Strategy.sdp, whole, (0, plan.profile.backward_slots - 1)))
    # The depth of a module is the number of names in its name.
    return tuple(sorted(groups, key=lambda g: (-max(m.count(".") + bool(m) for m in g.modules), g.forward)))


def _group(plan: Plan, units: list[int]) -> Group:
    profile = plan.profile
    modules = tuple(dict.fromkeys(m for u in units for m in modules_of(plan, u)))
    inside = [
        profile.units[u] for u in range(len(profile.units))
        if u in units or any(_within(m, outer) for m in modules_of(plan, u) for outer in modules)
    ]  # fmt: skip
    largest = max(units, key=lambda u: (profile.units[u].trainable, profile.layouts[u].param_bytes))
    backward = [u.backward for u in inside if u.backward is not None]
    strategy = plan.strategies[largest]
    if strategy is Strategy.zero2:  # FSDP2 keeps no whole parameters at rest beside shards
        strategy = Strategy.sdp
    forward = _span([u.forward for u in inside])
    return Group(modules, tuple(units), strategy, forward, _span(backward) if backward else None)


def _within(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")


def _span(spans: Sequence[Span]) -> Span:
    return min(first for first, _ in spans), max(last for _, last in spans)


def _fused(plan: Plan, groups: Sequence[Group]) -> list[Group]:
    """Join neighbours that have all messages in common."""
    together: dict[tuple[Kind, int], set[int]] = defaultdict(set)  # units that share a message of a kind with a unit
    for m in plan.messages:
        units = {u for u, _ in m.parts}
        for u in units:
            together[m.kind, u] |= units
    out: list[Group] = []
    for group in sorted(groups, key=lambda g: g.forward):
        if out and _one_group(out[-1], group, together):
            out[-1] = _group(plan, sorted((*out[-1].units, *group.units)))
        else:
            out.append(group)
    return out


def _one_group(first: Group, second: Group, together: Mapping[tuple[Kind, int], set[int]]) -> bool:
    modules = (*first.modules, *second.modules)
    if any(a != b and _within(a, b) for a in modules for b in modules) or first.forward[1] + 1 != second.forward[0]:
        return False
    both = {*first.units, *second.units}
    return first.strategy is second.strategy and all(both <= units for (_, u), units in together.items() if u in both)


def prefetch_lists(plan: Plan, groups: Sequence[Group], kind: Kind) -> dict[str, list[str]]:
    """Return the lists for ``set_modules_to_forward_prefetch`` (``AG_F``) or ``…_backward_prefetch`` (``AG_B``): name
    of a group -> names of the groups that it prefetches before it computes.

    The group before prefetches a group: in forward if the plan gathers it before its own slot, in backward always,
    which is the default of FSDP2.
    """
    # In order of use, outer groups before the groups inside them.
    spans = [(span[0], g) for g in reversed(groups) if (span := g.forward if kind is Kind.AG_F else g.backward)]
    order = [g for _, g in sorted(spans, key=lambda pair: pair[0])]
    return {
        before.name: [g.name]
        for before, g in itertools.pairwise(order)
        if g.units and not g.replicated and (g.strategy.regathers if kind is Kind.AG_B else _is_ahead(plan, g))
    }


def _is_ahead(plan: Plan, group: Group) -> bool:
    """Return whether the plan gathers some of the group before its own slot in the first forward."""
    own = plan.period.forward_start(0) + group.forward[0]
    return any(
        slot < own and m.kind.plain is Kind.AG_F and m.micro == 0 and any(u in group.units for u, _ in m.parts)
        for m, slot in zip(plan.messages, plan.schedule.slot, strict=True)
    )
