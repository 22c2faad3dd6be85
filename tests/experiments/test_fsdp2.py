"""The predicted step and memory of FSDP2 that runs a plan."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given

from experiments.fsdp2 import MemoryWalk, best_steps, fsdp2_plan, predicted_document
from mdcs.export.document import document, groups_of, prefetch_lists
from mdcs.planner.schedulers import Dear
from mdcs.profile.link import Collectives, Kind
from tests.mdcs.export.test_document import lost_of, named, of_nodes
from tests.mdcs.profiles import Job, chain, examples, jobs, link, planned, recomputable, schedulers, strategies

NATIVE = Collectives("native")


# ---- bytes, by hand: units of 32 bytes on two ranks, with gloo, whose gathers hold a copy

def peak_of(strategy: str, *sizes: int) -> dict[str, int]:
    plan = planned(chain(*sizes), strategy)
    groups = groups_of(plan)
    return MemoryWalk(plan.job, groups, {}, prefetch_lists(plan, groups, Kind.AG_B, 0), NATIVE).peak


def test_bytes_of_each_category_are_those_by_hand() -> None:
    # Gathering: shard 16, message 32, its copy 32. Then whole 32 and gradients 32; then their message 32 and gloo's copy 32, a
    # shard of gradients 16.
    assert peak_of("sdp", 8) == peak_of("sdp", 8) | {
        "parameters": 16, "staging": 64, "full_parameters": 32, "gradients": 32, "gradient_shards": 16, "total": 96,
    }  # fmt: skip
    # Shards 32, b's gradients' shard 16, its message and copy 64, a 32 with gradients 32; the copy outlives b's slot.
    assert peak_of("sdp", 8, 8)["total"] == 32 + 16 + 64 + 64
    # What is replicated has a second copy, and none of a message, which is its own; its gradients stay until the step.
    assert peak_of("dp", 8) == peak_of("dp", 8) | {"parameters": 32, "full_parameters": 32, "gradient_shards": 32, "total": 96}
    assert (peak_of("dp", 8, 8)["staging"], peak_of("dp", 8, 8)["gradient_shards"]) == (32, 64)
    assert peak_of("zero2", 8, 8)["gradient_shards"] == 32
    # sdp is kept from forward to backward. Of fsdp b is kept, its backward follows at once; a is gathered ahead then, in a
    # message that waits beside b.
    assert (peak_of("sdp", 8, 8)["full_parameters"], peak_of("fsdp", 8, 8)["full_parameters"]) == (64, 32)


def test_fsdp2_takes_longer_where_the_plan_hides_its_gathers() -> None:
    plan = planned(chain(64, 64, 64, link=link(0.01)), "zero2", Dear())
    predicted = best_steps(plan, groups_of(plan)).prediction
    run = fsdp2_plan(plan, groups_of(plan), {}, {})
    assert predicted.step_s > 9.0  # nine seconds of computing
    assert not run.cross_iteration and {m.kind for m in run.messages} == {Kind.RS, Kind.AG_F}


@given(jobs(), strategies, schedulers)
@examples(25)
def test_any_plan_can_be_taken_home(job: Job, strategy, scheduler) -> None:
    plan = job.plan(strategy, scheduler)
    file = json.loads(json.dumps(predicted_document(plan)))
    assert sorted(u for group in file["groups"] for u in group["units"]) == sorted(u.name for u in plan.profile.units)
    assert file["groups"][-1]["modules"] == [""]
    fsdp2 = file["predicted"]["fsdp2"]
    assert fsdp2["peak_bytes"] >= max(fsdp2["memory"].values()) > 0
    assert fsdp2["step_s"] >= sum(slot.seconds for slot in plan.profile.slots) * plan.micro_steps * (1 - 1e-9)


def test_a_unit_sharded_within_nodes_has_their_part_of_it() -> None:
    plan = of_nodes("hsdp_no_reshard", "sdp")
    peak = MemoryWalk(plan.job, groups_of(plan), {}, {}, NATIVE).peak
    assert (peak["parameters"], peak["gradient_shards"]) == (16 + 8, 16 + 8)


def test_the_predicted_step_sends_within_nodes() -> None:
    plan = of_nodes("hsdp_no_reshard", "hsdp", "sdp")
    run = fsdp2_plan(plan, groups_of(plan), {}, {})
    assert {m.kind for m in run.messages} == {Kind.RS_N, Kind.AG_F_N, Kind.AG_B_N, Kind.RS, Kind.AG_F}
    far = of_nodes("sdp", "fsdp", "sdp")
    assert best_steps(plan, groups_of(plan)).prediction.step_s < best_steps(far, groups_of(far)).prediction.step_s


def test_recomputation_is_carried_out_and_is_in_the_prediction() -> None:
    slots = tuple(replace(s, live=1000, peak=1000) for s in chain(8, 8).slots)
    profile = recomputable(named(replace(chain(8, 8), slots=slots), "a", "b"), freed=400, peak=0)
    kept, freed = (planned(profile, "fsdp", recompute=choices) for choices in ((), ("none", "full")))
    assert lost_of(freed) == lost_of(kept)
    assert [group["recompute"] for group in document(freed)["groups"]] == [{}, {"b": "full"}, {}]
    before, after = (predicted_document(plan)["predicted"]["fsdp2"] for plan in (kept, freed))
    assert after["step_s"] == before["step_s"] + 1 and after["peak_bytes"] <= before["peak_bytes"]
