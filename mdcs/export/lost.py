"""Features of a plan that FSDP2 or Megatron-FSDP lacks, as sentences."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from mdcs.export.groups import Ahead, Group, effective, fused_with, in_order, modules_of, planned_ahead
from mdcs.plan.messages import Plan
from mdcs.plan.period import Op
from mdcs.plan.strategy import Strategy
from mdcs.profile.link import Kind

_MEGATRON = {
    Strategy.dp: "no_shard",
    Strategy.zero2: "optim_grads",
    Strategy.sdp: "optim_grads_params",
    Strategy.fsdp: "optim_grads_params",
    Strategy.hsdp_no_reshard: "optim_grads_params",
    Strategy.hsdp: "optim_grads_params",
}


@dataclass(frozen=True)
class Lost:
    """A sentence that says what is lost, and the names of the units that lose it; no units: the whole plan."""

    what: str
    units: tuple[str, ...] = ()


def lost(plan: Plan, groups: tuple[Group, ...], forward: Ahead, backward: Ahead) -> list[Lost]:
    """Return the sentences, each once, with the names of its units in the plan's order."""
    found: dict[str, list[int]] = {}
    for unit, what in itertools.chain(_of_units(plan, groups), _gathered_later(plan, groups, forward, backward)):
        found.setdefault(what, []).append(unit)
    out = [Lost(what, tuple(plan.profile.units[u].name for u in dict.fromkeys(units))) for what, units in found.items()]
    if plan.budget is not None:
        out.append(Lost("has a byte budget that is enforced while it runs; FSDP2 has none: its peak is what its calls come to"))
    if plan.cross_iteration:
        out.append(
            Lost("updates a unit as soon as it is reduced, beside backward and the next forward; FSDP2 updates all of them in"
                 " optimizer.step(), after backward, and gathers nothing before it")
        )  # fmt: skip
    if any(section.master_bytes for layout in plan.profile.layouts for section in layout.sections):
        out.append(
            Lost("has float32 masters: keep the model in float32 and give fully_shard (or apply_plan) a MixedPrecisionPolicy"
                 " with param_dtype, and with reduce_dtype where gradients are summed in another type")
        )  # fmt: skip
    return out


def _of_units(plan: Plan, groups: tuple[Group, ...]) -> Iterator[tuple[int, str]]:
    of = {u: g for g in groups for u in g.units}
    together = fused_with(plan)
    first = [m for m in plan.messages if m.micro == 0]
    for u, strategy in enumerate(plan.strategies):
        g, own = of[u], [m for m in first if any(v == u for v, _ in m.parts)]
        if strategy is Strategy.zero2 and g.strategy is Strategy.sdp:
            yield u, (
                "zero2 becomes sdp (reshard_after_forward=False): the same bytes are sent; whole parameters are held from"
                " forward to backward, not between steps, and are gathered right before their use"
            )
        elif effective(strategy) is not g.strategy:
            yield u, f"{strategy} becomes {g.strategy}, that of the largest unit in its fully_shard group"
        if g.strategy is Strategy.dp:
            yield u, "dp is fully_shard on a mesh of shape (ranks, 1), with a second copy of parameters while they are used"
        uses = sum(s.unit == u and s.phase == "F" for s in plan.profile.slots)
        if g.strategy.regathers and uses > len(modules_of(plan, u)):
            yield u, "is used several times in a forward pass; FSDP2 gathers it for each of them"
        for kind in Kind:
            if sum(m.kind is kind for m in own) > len(plan.profile.layouts[u].sections):
                yield u, f"is sent in parts ({kind}); FSDP2 sends it whole"
            if together.get((kind, u), {u}) - {*g.units}:
                yield u, f"shares messages ({kind}) with units that FSDP2 sends by themselves"
        reductions = [m for m in own if not m.kind.is_gather]
        if reductions and min(m.slot for m in reductions) > plan.period.window(Op(reductions[0].kind, u, 0))[0]:
            yield u, "is reduced later than its gradients are there, behind other messages; FSDP2 reduces it at once"
        if any(m.kind.plain is Kind.AG_F and plan.unrolled(m) < plan.period.turn for m in own):
            yield u, "is gathered for the next step while backward runs; FSDP2 begins to gather with the forward pass"


def _gathered_later(
    plan: Plan, groups: tuple[Group, ...], forward: Ahead, backward: Ahead
) -> Iterator[tuple[int, str]]:
    for kind, lists in ((Kind.AG_F, forward), (Kind.AG_B, backward)):
        order = [g.name for g in in_order(groups, kind)]
        by = {target: name for name, targets in lists.items() for target in targets}
        planned = planned_ahead(plan, groups, kind)
        for g in groups:
            told = order.index(g.name) - order.index(by.get(g.name, g.name)) if g.name in order else 0
            if planned.get(g.name, 0) > told:
                for u in g.units:
                    yield u, f"is gathered further ahead ({kind}) in the plan, which is not faster here or takes too many bytes"


def megatron(plan: Plan) -> dict[str, object]:
    """Return the nearest mode of Megatron-FSDP (one mode for all units), and how the plan differs from it."""
    size: Counter[tuple[str, bool]] = Counter()
    for layout, strategy in zip(plan.profile.layouts, plan.strategies, strict=True):
        size[_MEGATRON[strategy], strategy.in_node] += layout.param_bytes
    mode, in_node = nearest = size.most_common(1)[0][0]
    kept = (Strategy.sdp, Strategy.hsdp_no_reshard)
    exact = [s for s in _MEGATRON if (_MEGATRON[s], s.in_node) == nearest and s not in kept]
    names = [u.name for u, s in zip(plan.profile.units, plan.strategies, strict=True) if s not in exact]
    return {
        "data_parallel_sharding_strategy": mode,
        "num_distributed_optimizer_instances": plan.world // plan.profile.per_node if in_node else 1,
        "share_of_parameters": round(size[nearest] / sum(size.values()), 3),
        "units_that_the_plan_has_otherwise": names,
        "lost": "One mode for all units: no_shard is dp, optim_grads is zero2, optim_grads_params is fsdp, with instances"
        " hsdp; there is no sdp. Messages are a unit's own, in the order of the model.",
    }
