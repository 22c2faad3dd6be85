"""One process as a rank of 8 or 64: the bytes are the ledger's, the order the plan's, and the link takes its time.

Losses and weights of sharded units mean nothing there; of replicated ones they are those of equal ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mdcs
from mdcs.emulation import EmulatedCommunicator, Emulation
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.profile.link import Collectives, Kind
from tests.mdcs.measured import measure_profile
from tests.mdcs.runtime.devices import Emulated, emulated_run
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, optimizer_for, scheduler_for, setup, strategy_for

pytestmark = pytest.mark.slow

BUFFERS = tuple(c for c in CATEGORIES if c != "activations")
LINK = mdcs.Link.uniform(0.25, 200.0, emulated=True)
MODELS: dict[str, dict[str, Any]] = {"line-96-128-128-64": {}, "gpt2": {"width": 64, "samples": 1}}
BLOCK = 40_000
PLANS = (
    How("dp", "wfbp"), How("zero2", "dear"), How("sdp", "partitioning", bytes=BLOCK), How("fsdp", "sequential"),
    How("fsdp", "priority", budget=1.3, bytes=BLOCK), How("random", "random", seed=5),
)  # fmt: skip
CASES = [(model, world, how) for model, world in zip(MODELS, (8, 64), strict=True) for how in PLANS]


def emulated(model: str, how: How, emulate: Emulation, **options: Any) -> Emulated:
    made = setup(model, **MODELS.get(model, {}))
    return emulated_run(made, optimizer_for("adam", made.model), how, emulate, LINK, **options)


def emulate_all(cases: list[tuple[str, int, How]]) -> list[Emulated]:
    return [emulated(model, how, Emulation(world // 3, world), steps=8) for model, world, how in cases]


NAMES = [f"{model.partition('-')[0]}-{world}-{how.strategy}-{how.scheduler}" for model, world, how in CASES]


@pytest.fixture(scope="module")
def runs(single: Ranks) -> dict[str, Emulated]:
    [found] = single.run(emulate_all, CASES, timeout_s=300)
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize("case", NAMES)
def test_what_a_rank_of_many_holds_is_what_the_ledger_says_to_the_byte(runs: dict[str, Emulated], case: str):
    """In every slot and at the peak; scratch only at its peak, as the optimizer holds it for an instant."""
    found = runs[case]
    predicted, measured = found.memory["predicted"], found.memory["measured"]
    assert {c: predicted[c] for c in BUFFERS} == {c: measured[c] for c in BUFFERS}
    steady = [c for c in BUFFERS if c != "update_scratch"]
    for slot, ledger, seen in found.slots:
        assert {c: ledger[c] for c in steady} == {c: seen[c] for c in steady}, slot
    plan = found.plan
    sharded = [plan.profile.layouts[u].elements for u, s in enumerate(plan.strategies) if s.sharded]
    assert found.shards == sum(sharded) // plan.world
    if plan.scheduler == "sequential":  # of which no timing can change the memory
        assert plan.prediction is not None
        assert {c: plan.prediction.memory[c] for c in BUFFERS} == {c: measured[c] for c in BUFFERS}
    if plan.budget is not None:
        assert measured["total"] <= plan.budget


@pytest.mark.parametrize("case", NAMES)
def test_messages_are_done_in_the_order_of_the_plan(runs: dict[str, Emulated], case: str):
    sent, n = runs[case].sent, len(runs[case].plan.messages)
    assert sent == sorted(sent)
    assert [index for round_, index in sent if 1 <= round_ < 4] == [*range(n)] * 3


@pytest.mark.parametrize("case", NAMES)
def test_steps_take_the_time_of_the_link(runs: dict[str, Emulated], case: str):
    """At least that: how much longer is a matter of what else the machine does."""
    plan, records, link = runs[case].plan, runs[case].records, runs[case].plan.profile.link
    bytes_s = sum(link.beta_of(m.kind) * plan.wire(m) for m in plan.messages)
    latency_s = sum(link.alpha_of(m.kind) for m in plan.messages if m.blocking)
    # A period need not begin where a step does, and where steps end in it moves: of all of them one may be missing.
    assert sum(r.times.step_s for r in records) >= 0.98 * (len(records) - 1) * (bytes_s + latency_s)
    assert sum(r.times.communication_s for r in records) >= 0.98 * (len(records) - 1) * bytes_s


def other_jobs() -> list[tuple[dict[str, int], dict[str, int]]]:
    found = []
    for collectives in (
        Collectives("native"), Collectives.default("nccl"),
    ):  # fmt: skip
        for strategy, scheduler in (("dp", "fusion"), ("fsdp", "fusion"), ("zero2", "sequential")):
            how = How(strategy, scheduler, collectives=collectives, bytes=BLOCK)
            found.append(emulated("gpt2", how, Emulation(0, 8), steps=4))
    found.append(emulated("gpt2", How("zero2", "priority"), Emulation(7, 8), clip_norm=0.1, micro_steps=2))
    return [(run.memory["predicted"], run.memory["measured"]) for run in found]


def test_every_algorithm_holds_what_the_ledger_says_and_so_do_clipping_and_accumulation(single: Ranks):
    [found] = single.run(other_jobs)
    for predicted, measured in found:
        assert {c: predicted[c] for c in BUFFERS} == {c: measured[c] for c in BUFFERS}


def contention() -> Any:
    made = setup("line-96-128-128-64")
    optimizer, emulate = optimizer_for("adam", made.model), Emulation(1, 8)
    units = mdcs.partition(made.model, made.policy)

    def step() -> torch.Tensor:
        return made.loss(made.model, made.batch(0, 0, 0))

    link = mdcs.Link.uniform(2, 10, emulated=True)
    return mdcs.autoprofile(made.model, optimizer, units, step, link=link, emulate=emulate)


def test_costs_are_fitted_to_plans_that_run_on_an_emulated_link_which_stays_as_it_is(single: Ranks):
    [profile] = single.run(contention)
    assert profile.world == 8 and profile.calibration_runs and profile.errors
    assert profile.link == mdcs.Link.uniform(2, 10, emulated=True)


# ---- in this process, without a process group


def test_replicated_units_train_as_equal_ranks_do():
    """Gradients are those of equal ranks: for dp it is a plain loop, bit for bit, as 8 is a power of two."""
    made, plain = setup("tied"), setup("tied")
    emulated_run(made, optimizer_for("adam", made.model), How("dp", "wfbp"), Emulation(3, 8), LINK, steps=4)
    optimizer = optimizer_for("adam", plain.model)
    for step in range(4):
        plain.loss(plain.model, plain.batch(step, 0, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = dict(made.model.named_parameters())
    assert all(torch.equal(trained[name], wanted) for name, wanted in plain.model.named_parameters())


@pytest.mark.parametrize("algorithm", ["native", "ring"])
def test_what_messages_bring(algorithm: str):
    """Rank 1 of 3: sums of three equal gradients, and copies of its own part of the parameters."""
    communicator = EmulatedCommunicator(Collectives(algorithm), Emulation(1, 3))
    gradient = torch.arange(6.0)
    out = torch.empty(2)
    communicator.launch(Kind.RS, gradient, torch.empty(2), out).wait()
    assert out.tolist() == [6.0, 9.0] and gradient.tolist() == [0, 1, 2, 3, 4, 5]
    communicator.launch(Kind.AR, gradient).wait()
    assert gradient.tolist() == [0, 3, 6, 9, 12, 15]
    communicator.launch(Kind.AG_F, gradient).wait()
    assert gradient.tolist() == [6, 9] * 3


def test_an_emulated_rank_is_one_of_its_world():
    with pytest.raises(ValueError, match="an emulated rank must be from 0 to 7, got 8"):
        Emulation(8, 8)


def refusals() -> list[str]:
    made = setup("tied")
    optimizer, units = optimizer_for("adam", made.model), mdcs.partition(made.model, made.policy)
    said = []
    real = mdcs.Link.uniform(1, 1)
    for link, emulate in ((LINK, Emulation(0, 16)), (real, Emulation(0, 8)), (LINK, None), (LINK, Emulation(0, 8))):
        profile = measure_profile(
            made.model, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), optimizer, world=8, link=link, iterations=1
        )
        plan = mdcs.make_plan(profile, *(planner(How("fsdp")) for planner in (strategy_for, scheduler_for)))
        try:
            with mdcs.parallelize(made.model, optimizer, plan, units, emulate=emulate, timeout_s=10) as parallel:
                try:
                    parallel.state_dict()
                except mdcs.RunError as e:
                    said.append(str(e))
        except mdcs.PlanError as e:
            said.append(str(e))
    return said


def test_what_an_emulated_world_is_not_is_refused(two: Ranks):
    assert refusals() == [
        "the plan is for 8 ranks, the emulated world has 16",
        "an emulated world sends nothing: plan with an emulated link, mdcs.Link.uniform(…, emulated=True)",
        "the plan is for 8 ranks, the process group has 1: start as many, or make a new plan",
        "rank 0: state_dict() needs all ranks; this run emulates them",
    ]
    for said in two.run(refusals):
        assert [line for line in said if "process group has 2" in line] == [
            "an emulated world is one process, the process group has 2",
            "an emulated world is one process, the process group has 2",
            "the plan is for 8 ranks, the process group has 2: start as many, or make a new plan",
            "an emulated world is one process, the process group has 2",
        ]
