"""Steps that are not the profiled one: layers left out, used more often or in another order, on all ranks or on some.

Each run is compared with DDP(find_unused_parameters=True), bit for bit on two ranks. A path is the list of blocks that a
batch goes through; the profiled one is 0, 1, 2, 3.
"""

from __future__ import annotations

import gc
import random
from collections import Counter
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.storage import UnitStorage
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_random_plans import random_plan
from tests.mdcs.runtime.training import How, Job, Twin, differing, distance, measured, optimizer_for, plan_for, plans_of_half

WHOLE = (0, 1, 2, 3)
STEPS = 5


class Head(nn.Module):
    """With a layer that no step uses, as BertModel's pooler."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pooler, self.out = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(x))
        return out


class Branching(nn.Module):
    """Goes through the blocks of a path, besides a block without use. Its second block has a frozen weight.

    The profiled step does not come to the last block, and comes to no gradient of ``side``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Linear(9, 8)) for _ in range(5))
        self.side = nn.Sequential(nn.Linear(8, 8))
        self.head = Head()
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x: Tensor, path: tuple[int, ...]) -> Tensor:
        hidden = self.stem(x)
        self.side(hidden)
        for i in path:
            hidden = hidden + self.blocks[i](hidden)
        out: Tensor = self.head(hidden)
        return out


POLICY = mdcs.ByClass(("Sequential", "Head"))
Paths = dict[tuple[int, int, int], tuple[int, ...]]
"""(step, micro-step, rank) -> the path of this batch, where it is not the whole one."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return Branching()


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step * 1000 + micro * 100 + rank))


def loss_of(model: nn.Module, paths: Paths, step: int, micro: int, rank: int) -> Tensor:
    loss: Tensor = model(batch(step, micro, rank), paths.get((step, micro, rank), WHOLE)).square().mean()
    return loss


def with_ddp(paths: Paths, job: Job) -> tuple[list[float], dict[str, Tensor]]:
    model, rank, losses = build(), dist.get_rank(), []
    twin = Twin(model, optimizer_for(job.optimizer, model), find_unused_parameters=True)
    for step in range(job.steps):
        losses += twin.step(*(
            lambda model, at=(step, micro, rank): loss_of(model, paths, *at) / job.micro_steps for micro in range(job.micro_steps)
        ))  # fmt: skip
    return losses, model.state_dict()


@lru_cache(maxsize=8)
def profile_of(optimizer: str) -> mdcs.Profile:
    model, rank = build(), dist.get_rank()
    units = mdcs.partition(model, POLICY)
    return measured(model, units, lambda: loss_of(model, {}, 0, 0, rank), optimizer_for(optimizer, model))


def with_plan(paths: Paths, job: Job, plan: mdcs.Plan) -> tuple[list[float], dict[str, Tensor], Counter[str]]:
    model, rank, losses = build(), dist.get_rank(), []
    optimizer = optimizer_for(job.optimizer, model)
    units = mdcs.partition(model, POLICY)
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=20) as parallel:
        for step in range(job.steps):
            for micro in range(job.micro_steps):
                loss = loss_of(model, paths, step, micro, rank) / job.micro_steps
                loss.backward()
                losses.append(loss.item())
            parallel.step()
            assert parallel._engine.account.outside == 0, "what the plan has freed is held"
        state = parallel.state_dict()
        records = parallel.records(flush=True)
    return losses, state, Counter(word for record in records for word in record.departures)


def left_by_a_run() -> int:
    """Train with a plan, and return how many of its units' storages there are when it has ended, without collecting garbage."""
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, UnitStorage) for each in gc.get_objects())
        job = Job("", steps=2)
        with_plan({}, job, plan_for(job, How("fsdp", "dear"), profile_of("adam")))
        return sum(isinstance(each, UnitStorage) for each in gc.get_objects()) - before
    finally:
        gc.enable()


def everywhere(path: tuple[int, ...]) -> Paths:
    return {(step, 0, rank): path for step in (1, 2, 4) for rank in range(2)}


CASES: dict[str, tuple[Paths, dict[str, int]]] = {
    "nothing": ({}, {}),
    "a layer left out": (everywhere((0, 1, 3)), {"left out blocks.2": 3}),
    "the first and the last": (everywhere((1, 2)), {"left out blocks.0": 3, "left out blocks.3": 3}),
    "all of them": (everywhere(()), {f"left out blocks.{i}": 3 for i in range(4)}),
    "all twice": (everywhere((0, 1, 2, 3, 0, 1, 2, 3)), {f"ran blocks.{i} once more": 3 for i in range(3)}),
    "one twice": (everywhere((0, 1, 1, 2, 3)), {"ran blocks.1 once more": 3}),
    "each rank another": ({(s, 0, r): ((0, 1), (2, 3))[r] for s in range(STEPS) for r in range(2)}, {}),
    "each rank another order": ({(s, 0, r): ((3, 2, 1, 0), (1, 1, 0, 3))[r] for s in range(STEPS) for r in range(2)}, {}),
}


def compare_all(name: str, job: Job) -> list[Counter[str]]:
    """Train under each plan of a half; return the departures on this rank, by the number of steps that had them."""
    paths, found = CASES[name][0], []
    paths = {(s, m, r): p for (s, _, r), p in paths.items() for m in range(job.micro_steps) if job.micro_steps == 1 or m != s % 3}
    losses, weights = with_ddp(paths, job)
    for how, plan in plans_of_half(job, profile_of(job.optimizer), [*CASES].index(name) % 2):
        mine, state, seen = with_plan(paths, job, plan)
        if dist.get_world_size() == 2:
            assert (mine, differing(state, weights)) == (losses, []), (how, seen)
        else:  # sums in another order
            assert mine == pytest.approx(losses, rel=1e-9) and distance(state, weights) < 1e-9, (how, seen)
        found.append(seen)
    return found


@pytest.mark.parametrize("name", CASES)
def test_steps_that_depart_train_as_ddp_does(two: Ranks, name: str):
    """Others are random (below)."""
    _, expected = CASES[name]
    for of_rank in two.run(compare_all, name, Job("", steps=STEPS), timeout_s=120):
        for seen in of_rank:
            assert expected.items() <= seen.items() and (name != "nothing" or not seen)


def test_a_run_that_has_ended_holds_no_memory(two: Ranks):
    """The presence thread, which sends parts of units to other ranks, must not keep them."""
    assert two.run(left_by_a_run) == [0, 0]


@pytest.mark.parametrize("name", ["a layer left out", "one twice", "each rank another"])
def test_in_some_of_the_micro_steps(two: Ranks, name: str):
    two.run(compare_all, name, Job("", 2, "adamw", steps=STEPS), timeout_s=120)


def compare_in_float64(name: str) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        compare_all(name, Job("", steps=STEPS))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["one twice", "each rank another", "each rank another order"])
def test_on_three_ranks(three: Ranks, name: str):
    three.run(compare_in_float64, name, timeout_s=150)


def random_departures(seeds: range) -> list[int]:
    """Random plans, half of them under the smallest budget, and paths that are random on each rank, or the same on all."""
    wrong = []
    for seed in seeds:
        rng = random.Random(seed)
        job = Job("", rng.choice([1, 1, 2, 3]), rng.choice(["adam", "sgd", "adamw"]), steps=4)
        profile = profile_of(job.optimizer)
        plan = on_rank_zero(lambda: random_plan(random.Random(seed), profile, job.micro_steps))  # noqa: B023
        paths: Paths = {}
        for step in range(job.steps):
            for micro in range(job.micro_steps):
                own = [tuple(rng.choices(range(5), k=rng.randrange(7))) for _ in range(2)]
                if rng.random() < 0.7:
                    paths |= {(step, micro, rank): own[rank * rng.randrange(2)] for rank in range(2)}
        losses, state, _ = with_plan(paths, job, plan)
        wanted, weights = with_ddp(paths, job)
        if (losses, differing(state, weights)) != (wanted, []):
            wrong.append(seed)
    return wrong


@pytest.mark.parametrize("call", [pytest.param(c, marks=[pytest.mark.slow] if c else []) for c in range(4)])
def test_random_departures_under_random_plans(two: Ranks, call: int):
    assert two.run(random_departures, range(call * 12, call * 12 + 12), timeout_s=200) == [[], []]
