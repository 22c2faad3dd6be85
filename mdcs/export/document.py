"""The JSON file of an exported plan: calls of fully_shard.

A group is one call: modules that are gathered and reduced together, with the groups that it prefetches. A unit becomes
a group of its own. Units that share a module, and neighbours whose every message the plan fuses, become one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE
from mdcs.profile.schema import Profile

SCHEMA = 3

_AHEAD = 1
"""Groups that FSDP2 gathers ahead by itself."""


def document(plan: Plan) -> dict[str, Any]:
    """Return plain containers for JSON, with everything that :func:`mdcs.export.fsdp2.apply_plan` needs.

    A group prefetches one group at most, and no further ahead than the plan.
    """
    groups = groups_of(plan)
    forward, backward = (prefetch_lists(plan, groups, kind, _AHEAD) for kind in (Kind.AG_F, Kind.AG_B))
    return {
        "schema": SCHEMA,
        "about": "how torch's fully_shard (FSDP2, torch >= 2.6) comes nearest to a plan of mdcs; docs/export.md has "
        "a loader",
        "plan": plan.hash,
        "ranks": plan.world,
        "groups": [_describe(plan, g, forward, backward) for g in groups],
    }


def _describe(plan: Plan, group: Group, forward: PrefetchLists, backward: PrefetchLists) -> dict[str, Any]:
    units = [plan.profile.units[u] for u in group.units]
    again = [(u, plan.recompute[u]) for u in group.units if plan.recompute and plan.recompute[u] != NONE]
    return {
        "modules": list(group.modules),
        "units": [unit.name for unit in units],
        "strategy": str(group.strategy),
        "elements": sum(unit.numel for unit in units),
        "mesh": list(group.mesh(plan.profile)),
        "reshard_after_forward": group.reshard_after_forward,
        "recompute": {name: choice for u, choice in again for name in modules_of(plan, u)},
        "forward_prefetch": list(forward.get(group.name, ())),
        "backward_prefetch": list(backward.get(group.name, ())),
    }


def describe_group(group: Mapping[str, Any]) -> str:
    """Return a group of the file in words, for messages."""
    units = group["units"]
    return f"unit {', '.join(units)}" if units else "the whole model"


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

    @property
    def reshard_after_forward(self) -> bool:
        """Argument of fully_shard. A replicated group frees its second copy, which costs no message."""
        return self.strategy.regathers or self.replicated

    def mesh(self, profile: Profile) -> tuple[int, ...]:
        """Return the shape of its mesh: [ranks], or [replicas, shards] where several ranks keep the same shard."""
        shards = self.strategy.parts(profile)
        return (shards,) if shards == profile.world and not self.replicated else (profile.world // shards, shards)


PrefetchLists = dict[str, tuple[str, ...]]
"""Name of a group -> names of the groups that it prefetches before it computes."""


def fsdp2_strategy(strategy: Strategy) -> Strategy:
    """Return the strategy that FSDP2 runs: zero2 becomes sdp, for FSDP2 keeps no whole parameters at rest beside
    shards.
    """
    return Strategy.sdp if strategy is Strategy.zero2 else strategy


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
    members = _fused(plan, members)
    groups = [_group(plan, sorted(m)) for m in members]
    if not any("" in g.modules for g in groups):
        whole = (0, plan.profile.forward_slots - 1)
        groups.append(Group(("",), (), Strategy.sdp, whole, (0, plan.profile.backward_slots - 1)))
    return tuple(sorted(groups, key=lambda g: (-max(map(_depth, g.modules)), g.forward)))


def _depth(module: str) -> int:
    return len(module.split(".")) if module else 0


def _group(plan: Plan, units: list[int]) -> Group:
    profile = plan.profile
    modules = tuple(dict.fromkeys(m for u in units for m in modules_of(plan, u)))
    inside = [
        profile.units[u] for u in range(len(profile.units))
        if u in units or any(_within(m, outer) for m in modules_of(plan, u) for outer in modules)
    ]  # fmt: skip
    largest = max(units, key=lambda u: (profile.units[u].trainable, profile.layouts[u].param_bytes))
    backward = [u.backward for u in inside if u.backward is not None]
    forward, strategy = _span([u.forward for u in inside]), fsdp2_strategy(plan.strategies[largest])
    return Group(modules, tuple(units), strategy, forward, _span(backward) if backward else None)


def _within(module: str, outer: str) -> bool:
    return not outer or module.startswith(f"{outer}.")


def _span(spans: Iterable[Span]) -> Span:
    spans = list(spans)
    return min(first for first, _ in spans), max(last for _, last in spans)


def fused_with(plan: Plan) -> dict[tuple[Kind, int], set[int]]:
    """Return, by (kind, unit), the units that share some message of this kind with the unit (itself included)."""
    out: dict[tuple[Kind, int], set[int]] = {}
    for m in plan.messages:
        units = {u for u, _ in m.parts}
        for u in units:
            out.setdefault((m.kind, u), set()).update(units)
    return out


def _fused(plan: Plan, members: list[set[int]]) -> list[set[int]]:
    """Join neighbours that have all messages in common."""
    together = fused_with(plan)
    ordered = sorted(members, key=lambda m: _group(plan, sorted(m)).forward)
    out: list[set[int]] = []
    for one in ordered:
        if out and _one_group(plan, out[-1], one, together):
            out[-1] = out[-1] | one
        else:
            out.append(one)
    return out


def _one_group(plan: Plan, before: set[int], after: set[int], together: dict[tuple[Kind, int], set[int]]) -> bool:
    both = [_group(plan, sorted(one)) for one in (before, after)]
    modules = [m for g in both for m in g.modules]
    if any(a != b and _within(a, b) for a in modules for b in modules) or both[0].forward[1] + 1 != both[1].forward[0]:
        return False
    kinds = {kind for kind, u in together if u in before | after}
    alike = both[0].strategy is both[1].strategy
    return alike and all(before | after <= together.get((kind, u), set()) for kind in kinds for u in before | after)


def prefetch_distance(plan: Plan, groups: tuple[Group, ...], kind: Kind) -> dict[str, int]:
    """Return by how many groups the plan gathers each group ahead of its use; 0: at its own slot.

    ``kind`` is ``AG_F`` or ``AG_B``. The first message of the group counts. Replicated groups, and groups without a
    gather, are left out.
    """
    start = plan.period.forward_start(0) + (0 if kind is Kind.AG_F else plan.profile.forward_slots)
    order = in_order(groups, kind)
    firsts = [start + _first(g, kind) for g in order]
    out = {}
    for place, g in enumerate(order):
        sent = [
            slot
            for m, slot in zip(plan.messages, plan.schedule.slot, strict=True)
            if m.kind.plain is kind and m.micro == 0 and any(u in g.units for u, _ in m.parts)
        ]
        if sent and not g.replicated:
            by = max([i for i in range(place + 1) if firsts[i] <= min(sent)], default=0)
            out[g.name] = place - by
    return out


def in_order(groups: tuple[Group, ...], kind: Kind) -> list[Group]:
    """Return the groups that FSDP2 gathers, in order of use; outer groups before the groups inside them.

    ``kind`` is ``AG_F`` for forward, another gather for backward.
    """
    used = [g for g in reversed(groups) if kind is Kind.AG_F or g.backward is not None]
    return sorted(used, key=lambda g: _first(g, kind))


def _first(group: Group, kind: Kind) -> int:
    span = group.forward if kind is Kind.AG_F else group.backward
    assert span is not None
    return span[0]


def prefetch_lists(plan: Plan, groups: tuple[Group, ...], kind: Kind, limit: int) -> PrefetchLists:
    """Return the lists for ``set_modules_to_forward_prefetch`` (``AG_F``) or ``…_backward_prefetch`` (``AG_B``).

    Each group is prefetched as far ahead as the plan gathers it, at most ``limit`` groups; in backward at least one,
    which is the default of FSDP2.
    """
    order = in_order(groups, kind)
    far = prefetch_distance(plan, groups, kind)
    least = 1 if kind is Kind.AG_B else 0
    out: dict[str, list[str]] = {}
    for place, g in enumerate(order):
        if g.units and not g.replicated and (kind is Kind.AG_F or g.strategy.regathers):
            by = place - min(place, max(least, min(limit, far.get(g.name, 0))))
            if by != place:
                out.setdefault(order[by].name, []).append(g.name)
    return {name: tuple(targets) for name, targets in out.items()}
