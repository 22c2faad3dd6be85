"""A plan as calls of fully_shard: which modules go together, what they gather ahead."""

from __future__ import annotations

from dataclasses import replace

from mdcs.export.document import Group, document, groups_of, prefetch_lists
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.planner.pipeline import Scheduler
from mdcs.planner.schedulers import Dear, StrategyAssignment
from mdcs.profile.link import Collectives, Kind
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import chain, in_nodes, link, planned, tied

NATIVE = Collectives("native")


def named(profile: Profile, *names: str) -> Profile:
    return replace(profile, units=tuple(replace(u, name=n) for u, n in zip(profile.units, names, strict=True)))


# ---- groups


def test_a_unit_is_a_group_and_the_model_itself_comes_last() -> None:
    plan = planned(named(chain(8, 4, 4), "a", "b.c", "b"), "fsdp")
    assert [g.modules for g in groups_of(plan)] == [("b.c",), ("a",), ("b",), ("",)]


def test_what_the_model_has_beside_its_units_is_its_own_group() -> None:
    groups = groups_of(planned(named(chain(8, 4), "a", "model"), "sdp"))
    assert [(g.modules, g.units) for g in groups] == [(("a",), (0,)), (("",), (1,))]
    # What lies inside counts: FSDP2 gathers the model's own before its first module.
    assert groups[1].forward == (0, 1)


def test_a_module_named_model_is_not_the_model() -> None:
    groups = groups_of(planned(named(chain(8, 4), "model.a", "model"), "sdp"))
    assert [g.modules for g in groups] == [("model.a",), ("model",), ("",)]


def test_tied_weights_are_one_call_for_both_modules_with_what_else_is_in_them() -> None:
    plan = planned(named(tied(8, 4, 2), "wte+head", "h", "head"), "fsdp")
    assert [(g.modules, g.units) for g in groups_of(plan)][:2] == [(("wte", "head"), (0, 2)), (("h",), (1,))]


def test_frozen_and_trained_parameters_of_a_module_are_one_group() -> None:
    [group, _] = groups_of(planned(named(chain(8, 4, frozen=[1]), "h", "h[frozen]"), ["fsdp", "dp"]))
    assert (group.modules, group.units, group.strategy) == (("h",), (0, 1), Strategy.fsdp)


def fused(plan: Plan, *kinds: Kind) -> Plan:
    """With the messages of these kinds of a and b together."""
    mix = StrategyAssignment(plan.job, plan.strategies)
    drafts = []
    for kind in Kind:
        own = [op for op in mix.ops if op.kind is kind]
        for ops in [own] if kind in kinds else [[op] for op in own]:
            if ops:
                first, last = max(mix.period.window(op)[0] for op in ops), min(mix.period.window(op)[1] for op in ops)
                drafts.append(Message(kind, tuple((op.unit, 0) for op in ops), last if kind.is_gather else first))
    return mix.plan("fused", mix.unpartitioned_blocks(), drafts)


def test_neighbours_are_one_group_if_every_message_has_both() -> None:
    plan = planned(chain(8, 4), "sdp")
    assert [g.modules for g in groups_of(fused(plan, Kind.RS, Kind.AG_F))] == [("a", "b"), ("",)]
    alone = fused(plan, Kind.RS)
    assert [g.modules for g in groups_of(alone)] == [("a",), ("b",), ("",)]


# ---- what is gathered ahead


def test_groups_gather_ahead_in_forward_if_the_plan_does() -> None:
    profile = chain(4, 4, 4, 4, link=link(1.0))
    plan, needed = planned(profile, "sdp", Dear()), planned(profile, "sdp")
    assert prefetch_lists(plan, groups_of(plan), Kind.AG_F) == {"a": ["b"], "b": ["c"], "c": ["d"]}
    assert prefetch_lists(needed, groups_of(needed), Kind.AG_F) == {}


def test_backward_gathers_one_ahead_by_itself() -> None:
    plan = planned(chain(4, 4, 4), "fsdp")
    assert prefetch_lists(plan, groups_of(plan), Kind.AG_B) == {"c": ["b"], "b": ["a"]}


def test_a_group_is_named_by_its_first_module() -> None:
    assert Group(("a", "b"), (0, 1), Strategy.dp, (0, 1), None).name == "a"


# ---- nodes


def of_nodes(*names: str, scheduler: Scheduler | None = None) -> Plan:
    """Units of 32 bytes each on two nodes of two ranks."""
    return planned(chain(*[8] * len(names), world=4, link=in_nodes(link(1.0), 4, 2, 0.1)), names, scheduler)


def test_each_unit_has_the_mesh_of_its_strategy() -> None:
    plan = of_nodes("fsdp", "hsdp_no_reshard", "dp", "hsdp", "zero2")
    groups = document(plan)["groups"]
    assert [group["mesh"] for group in groups] == [[4], [2, 2], [4, 1], [2, 2], [4], [4]]
    assert [group["reshard_after_forward"] for group in groups][:5] == [True, False, True, True, False]


def test_gathers_within_nodes_are_made_ahead_as_others_are() -> None:
    plan = of_nodes("hsdp_no_reshard", "hsdp_no_reshard", "hsdp_no_reshard", scheduler=Dear())
    assert prefetch_lists(plan, groups_of(plan), Kind.AG_F) == {"a": ["b"], "b": ["c"]}
    plan = of_nodes("hsdp", "hsdp", "hsdp_no_reshard")
    assert prefetch_lists(plan, groups_of(plan), Kind.AG_B) == {"c": ["b"], "b": ["a"]}
