"""Units whose activations the runtime computes again train as with DistributedDataParallel, and need what the ledger says."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch.distributed as dist

import mdcs
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.planner.strategies import Uniform
from mdcs.profile.recompute import CHOICES
from mdcs.profiler.consensus import on_rank_zero
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops_models import as_with_ddp
from tests.mdcs.runtime.training import How, Job, compare, measured, optimizer_for, plan_for, profile_of, setup, train

REFUSED = {
    "spectral_norm": "its forward changes a buffer, so it cannot be computed again with the same result",
    "an LSTM": "Tensor cached during selective activation checkpoint has been mutated",
    "with a gradient penalty": "only allowed to backward once on any region computed under selective activation checkpoint",
}
"""Cases in which a unit cannot; where it is measured it has no option."""


@pytest.mark.parametrize(
    ("how", "group"),
    few([
        ("fsdp full", "LOSSES"), ("fsdp selective", "CHECKPOINTS"), ("random mixed", "MODELS"), ("fsdp full", "HOOKS"),
        ("fsdp selective", "OUTPUTS"), ("random mixed", "LOSSES"), ("fsdp full", "CHECKPOINTS"), ("fsdp selective", "MODELS"),
    ]),
)  # fmt: skip
def test_models_of_others_train_as_with_ddp(two: Ranks, group, how):
    """Dropout, autocast, several forward passes, adapters and frozen weights, checkpoints of the model's own, hooks of others."""
    for found in two.run(as_with_ddp, "tests.mdcs.runtime.test_loops_models", group, how, timeout_s=200):
        differing = {name: what for name, what in found.items() if what}
        assert [name for name, what in differing.items() if REFUSED.get(name, what + "!") not in what] == []


@pytest.mark.parametrize(
    ("job", "how"),
    few(
        [
            (Job("resnet", steps=4), How("fsdp", "priority", recompute="full")),  # running statistics
            (Job("gpt2", 2, steps=4), How("random", "random", budget=1.3, seed=1, recompute="random")),  # tied weights
            (Job("twice", steps=4), How("sdp", "wfbp", recompute="selective")),
            (Job("frozen", steps=4), How("fsdp", "fusion", recompute="full")),
            (Job("bert", 2, clip_norm=0.1, exact_norm=True, steps=4), How("zero2", "dear", recompute="selective")),
            (Job("checkpointed", steps=4), How("fsdp", "partitioning", recompute="full")),
            (Job("pictures", steps=4), How("dp", "mg_wfbp", recompute="random", seed=2)),
            (Job("mixed", 3, steps=4), How("random", "sequential", recompute="random", seed=3)),
        ],
        3,
    ),
)
def test_two_ranks_are_bitwise_equal(two: Ranks, job, how):
    assert [result["bitwise"] for result in two.run(compare, job, how)] == [True, True]


def drop() -> bool:
    """Drop a run without closing it; return whether it is gone, and its threads with it."""
    job, made = Job("gpt2"), setup("gpt2")
    own, optimizer = How("dp", "wfbp", recompute="full"), optimizer_for("adam", made.model)
    units = mdcs.partition(made.model, made.policy)
    plan = plan_for(job, own, profile_of(job, own, made, units, optimizer), made.model)
    parallel = mdcs.parallelize(made.model, optimizer, plan, units, progress=False)
    made.loss(made.model, made.batch(0, 0, dist.get_rank())).backward()
    parallel.step()
    parallel.drain()
    engine = weakref.ref(parallel._engine)
    dist.barrier()
    del parallel
    gc.collect()
    return engine() is None and not [t.name for t in threading.enumerate() if t.name.startswith("mdcs")]


def test_a_run_that_is_dropped_ends(two: Ranks):
    assert two.run(drop) == [True, True]
    two.stop()


def bytes_of_slots(model: str, strategy: str) -> list[tuple[str, int, int]]:
    """(slot, measured, predicted) total peaks of a run in which units compute again, each in its way."""
    job = Job(model, steps=4)
    made = setup(model, **SHAPES[model])
    optimizer, units = optimizer_for("adam", made.model), mdcs.partition(made.model, made.policy)
    profile = measured(made.model, units, lambda: made.loss(made.model, made.batch(0, 0, 0)), optimizer, recompute=True)
    can = {(option.unit, option.choice) for option in profile.recompute}
    wanted = [CHOICES[1 + u % 2] for u in range(len(units))]
    choices = tuple(choice if (u, choice) in can else "none" for u, choice in enumerate(wanted))
    assert len({*choices}) > 1
    planned = mdcs.Job(profile, recompute=choices)
    plan = on_rank_zero(lambda: mdcs.make_plan(planned, Uniform(strategy), SCHEDULERS["sequential"]()))
    with mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=20) as parallel:
        train(job, made, parallel, optimizer)
        parallel.drain()
        return [(m.slot, m.measured["total"], m.predicted["total"]) for m in parallel.memory_by_slot() if m.measured]


SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"width": 64}, "llama": {"width": 64}, "bert": {"width": 64}, "resnet": {"image": 64, "samples": 4},
}  # fmt: skip


@pytest.mark.parametrize(("model", "strategy"), few([("gpt2", "fsdp"), ("llama", "dp"), ("bert", "zero2"), ("resnet", "sdp")]))
def test_peaks_are_those_of_the_ledger_slot_by_slot(two: Ranks, model, strategy):
    for slots in two.run(bytes_of_slots, model, strategy, timeout_s=120):
        assert slots
        assert max(m for _, m, _ in slots) == pytest.approx(max(p for _, _, p in slots), rel=0.005)
        assert [(name, m, p) for name, m, p in slots if m > p] == []
