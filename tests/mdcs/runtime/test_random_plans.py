"""Property: whatever a valid plan says, training is bitwise DDP's, no weight is stale and nothing hangs.

104 plans, each a function of its seed: random mixes, cuts, fusions, issue slots, blocking messages, depths, units that compute
their activations again, half of them under the smallest budget they can run in, with drains, evaluations (some of which raise),
state dicts, saved and loaded, loans of whole parameters, looks at gradients, collectives of the loop's own, batches that raise or
that are left out, and other plans after close() in between. The model has tied and frozen weights, and units whose sizes are no
multiple of the ranks; every fourth time units of two types, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mdcs
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import choices
from mdcs.planner.schedulers import RandomOrder, StrategyAssignment
from mdcs.profile.link import ALGORITHMS, Collectives
from mdcs.profile.recompute import CHOICES
from mdcs.profiler.consensus import on_rank_zero
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import Broken, _break
from tests.mdcs.runtime.training import How, Job, differing, distance, optimizer_for, profile_of, recomputing, reference, setup

STEPS = 3
PLANS, CALLS = 104, 4  # all but the first call are slow
BETWEEN = ("", "", "drain", "evaluate", "evaluate in vain", "state", "load", "full", "collective", "caught", "left out", "reopen")


def random_plan(
    rng: random.Random, profile: mdcs.Profile, micro_steps: int, made: Any = None, units: Sequence[mdcs.ModelUnit] = ()
) -> mdcs.Plan:
    """``made`` and its units: some compute their activations again."""
    mix = tuple(rng.choice(choices(profile)) for _ in profile.units)
    order = RandomOrder(rng.randrange(1 << 30), max_blocks=rng.choice([1, 2, 4]), fuse=rng.choice([0.0, 0.3, 0.9]))
    job = mdcs.Job(profile, micro_steps, cross_iteration=rng.random() < 0.7)
    again = rng.choice([CHOICES[:1], CHOICES])
    if made is not None:
        job = recomputing(job, made.model, list(units), [rng.choice(again) for _ in units])
    plan = order.schedule(StrategyAssignment(job, mix))
    blocking = rng.choice([0.0, 0.0, 0.2])
    messages = tuple(dataclasses.replace(m, blocking=rng.random() < blocking) for m in plan.messages)
    plan = dataclasses.replace(plan, messages=messages)
    return dataclasses.replace(plan, budget=min_feasible_budget(plan)) if rng.random() < 0.5 else plan


def train_random_plan(seed: int, double: bool) -> dict[str, Any]:
    rng = random.Random(seed)
    rank, world = dist.get_rank(), dist.get_world_size()
    between = [rng.choice(BETWEEN) for _ in range(STEPS)]
    job = Job("tied", rng.choice([1, 1, 2, 3]), rng.choice(["adam", "sgd", "adamw"]), double=double, steps=STEPS)
    if seed % 4 == 3 and not double:
        job = dataclasses.replace(job, model="wider" if "sgd" in job.optimizer else "mixed")
    wanted = reference(job)
    made = setup(job.model, job.double)
    optimizer = optimizer_for(job.optimizer, made.model)
    schedule = job.scheduler(optimizer)
    units = mdcs.partition(made.model, made.policy)
    collectives = Collectives(rng.choice(ALGORITHMS["gloo"]))
    how = How(depth=rng.choice([1, 2, 3, 8]), collectives=collectives, emulated=rng.random() < 0.1)
    profile = profile_of(job, how, made, units, optimizer)
    losses = []

    def start(seed: int) -> mdcs.Session:
        plan = on_rank_zero(lambda: random_plan(random.Random(seed), profile, job.micro_steps, made, units))
        return stack.enter_context(mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=20))

    with contextlib.ExitStack() as stack:
        parallel = start(seed)
        for step in range(STEPS):
            if between[step] == "caught":
                raise_in_forward(made, rng.randrange(job.micro_steps), rng.choice(["blocks.0", "blocks.2", "norm"]))
                parallel.abandon()
            elif between[step] == "left out":  # its loss is not finite, say
                made.loss(made.model, made.batch(88, 0, 0))
                parallel.abandon()
            for micro in range(job.micro_steps):
                loss = made.loss(made.model, made.batch(step, micro, rank)) / job.micro_steps
                loss.backward()
                losses.append(loss.item())
            parallel.step()
            schedule.step()
            if between[step] == "drain":
                parallel.drain()
            elif between[step] == "evaluate":
                with torch.inference_mode(), parallel.evaluate():
                    for _ in range(rank):
                        made.loss(made.model, made.batch(0, 0, 0))
            elif between[step] == "evaluate in vain":
                with contextlib.suppress(Broken), torch.no_grad(), parallel.evaluate():
                    made.loss(made.model, made.batch(0, 0, 0))
                    raise_in_forward(made, 0, rng.choice(["blocks.0", "norm"]))
                    raise Broken
            elif between[step] == "load":
                parallel.load_state_dict(parallel.state_dict())
            elif between[step] == "collective":
                dist.all_reduce(torch.ones(rng.randrange(1, 1000)))
            elif between[step] == "state":
                parallel.state_dict(rank0_only=rng.random() < 0.5)
            elif between[step] == "full":
                with parallel.full_parameters(cpu=rng.random() < 0.5, writeback=rng.random() < 0.5):
                    assert all(p.isfinite().all() for p in made.model.parameters())
            elif between[step] == "reopen":
                parallel.close()
                parallel = start(seed + 5000)
        state = parallel.state_dict()
        records = parallel.records(flush=True)
    return {
        "seed": seed,
        "losses": max(abs(a - b) for a, b in zip(losses, wanted.losses, strict=True)),
        "weights": distance(state, wanted.state),
        "bitwise": losses == list(wanted.losses) and not differing(state, wanted.state),
        # Of a whole period: the last one's gathers were not issued any more.
        "all sent": {"caught", "left out", "reopen"} & set(between)
        or dict(Counter(str(m.kind) for m in parallel.plan.messages)) == records[0].messages,
        "world": world,
    }


def raise_in_forward(made: Any, micro_step: int, place: str) -> None:
    """Batches of which the last raises."""
    for _ in range(micro_step):
        made.loss(made.model, made.batch(88, 0, 0)).backward()
    handle = made.model.get_submodule(place).register_forward_hook(_break)
    with contextlib.suppress(Broken):
        made.loss(made.model, made.batch(88, 0, 0))
    handle.remove()


def train_random_plans(seeds: range, double: bool) -> list[dict[str, Any]]:
    out = []
    for seed in seeds:
        try:
            out.append(train_random_plan(seed, double))
        except Exception as error:
            raise RuntimeError(f"plan {seed}: {error!r}") from error
    return out


@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.slow] if c else []) for c in range(CALLS)])
def test_two_ranks_are_bitwise_equal(two: Ranks, call: int):
    seeds = range(call * PLANS // CALLS, (call + 1) * PLANS // CALLS)
    for results in two.run(train_random_plans, seeds, False, timeout_s=200):
        assert [r["seed"] for r in results if not r["bitwise"]] == []
        assert [r["seed"] for r in results if not r["all sent"]] == []
        assert len(results) == len(seeds)


def test_three_ranks_differ_by_rounding(three: Ranks):
    for results in three.run(train_random_plans, range(1000, 1012), True, timeout_s=200):
        assert [r["seed"] for r in results if max(r["losses"], r["weights"]) > 1e-9] == []
        assert {r["world"] for r in results} == {3}
