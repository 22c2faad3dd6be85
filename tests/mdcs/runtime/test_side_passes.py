"""Steps of any passes: several backward passes, passes without gradients, penalties, in and out of ``no_sync()``.

A loop is a function of a model, the step and a context for passes whose gradients wait. It runs with a plan, and as it is
on plain models whose gradients are averaged over the ranks before the update, as DDP does. Two ranks: bit for bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.plan.worst_case import min_feasible_budget
from mdcs.profiler.consensus import merge_profiles
from mdcs.profiler.model_profile import measure_profile
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, differing, optimizer_for, plan_for

STEPS = 3
POLICY = mdcs.ByClass(("Sequential",))


class Net(nn.Module):
    """A stem, three blocks of which one has a frozen weight, a head. ``parts`` says how far a pass goes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8)) for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        hidden = self.stem(x)
        for block in self.blocks[:depth]:
            hidden = hidden + block(hidden)
        out: Tensor = self.head(hidden)
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch(step: int, number: int = 0) -> Tensor:
    seed = step * 1000 + number * 100 + dist.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


Context = Callable[[], AbstractContextManager[Any]]
Loop = Callable[[Any, int, Context], None]
"""(model, number of the step, ``no_sync``): the passes of one step."""

# ---- passes without gradients


def pseudo_labels(model: Any, step: int, no_sync: Context) -> None:
    with torch.no_grad():
        wanted = model(batch(step, 1))
    (model(batch(step)) - wanted).square().mean().backward()


def a_reference_between_the_passes(model: Any, step: int, no_sync: Context) -> None:
    out = model(batch(step))
    with torch.no_grad():
        wanted = model(batch(step, 1))
    (out - wanted).square().mean().backward()


def generation(model: Any, step: int, no_sync: Context) -> None:
    x = batch(step, 1)
    with torch.inference_mode():
        for _ in range(2):
            x = x + model(x).repeat(1, 2)
    loss(model(batch(step)) + x.mean().item()).backward()


def one_on_each_rank_and_two_on_the_second(model: Any, step: int, no_sync: Context) -> None:
    for number in range(1, 2 + dist.get_rank()):
        with torch.no_grad():
            model(batch(step, number))
    loss(model(batch(step))).backward()


# ---- gradients of something else than the parameters


def an_attack(model: Any, step: int, no_sync: Context) -> None:
    x = batch(step).requires_grad_()
    x = x + 0.1 * torch.autograd.grad(loss(model(x)), x)[0].sign()
    loss(model(x.detach())).backward()


def an_attack_by_backward(model: Any, step: int, no_sync: Context) -> None:
    x = batch(step).requires_grad_()
    with no_sync():
        loss(model(x)).backward()
    assert x.grad is not None
    model.zero_grad()
    loss(model(x.detach() + 0.1 * x.grad.sign())).backward()


def a_penalty(model: Any, step: int, no_sync: Context) -> None:
    real, fake = batch(step), batch(step, 1)
    mixed = (0.3 * real + 0.7 * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
    (model(fake).mean() - model(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()


def a_penalty_on_gradients_of_weights(model: Any, step: int, no_sync: Context) -> None:
    first = loss(model(batch(step)))
    trained = [p for p in model.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(first, trained, create_graph=True)
    (first + 0.1 * sum(slope.square().sum() for slope in slopes)).backward()


def for_another_model(model: Any, step: int, no_sync: Context) -> None:
    x = batch(step, 1).requires_grad_()
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    loss(model(x)).backward()
    for p in trained:
        p.requires_grad_(True)
    assert x.grad is not None
    loss(model(batch(step) + x.grad)).backward()


# ---- several backward passes, of which the last one ends the step


def two_losses(model: Any, step: int, no_sync: Context) -> None:
    out = model(batch(step))
    with no_sync():
        out.square().mean().backward(retain_graph=True)
    out.abs().mean().backward()


def two_forwards_then_two_backwards(model: Any, step: int, no_sync: Context) -> None:
    first, second = (loss(model(batch(step, i))) for i in range(2))
    with no_sync():
        first.backward()
    second.backward()


def one_pass_more_than_planned(model: Any, step: int, no_sync: Context) -> None:
    with no_sync():
        loss(model(batch(step))).backward()
        loss(model(batch(step, 1), depth=1)).backward()
    loss(model(batch(step, 2))).backward()


def as_many_as_the_rank_likes(model: Any, step: int, no_sync: Context) -> None:
    with no_sync():
        for i in range(1 + 2 * dist.get_rank()):
            loss(model(batch(step, i), depth=i)).backward()
    loss(model(batch(step, 9))).backward()


def all_before_the_step(model: Any, step: int, no_sync: Context) -> None:
    with no_sync():
        for i in range(2):
            loss(model(batch(step, i), depth=2)).backward()


def of_some_weights(model: Any, step: int, no_sync: Context) -> None:
    loss(model(batch(step))).backward(inputs=[p for p in model.parameters() if p.requires_grad][2:])


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        pseudo_labels, a_reference_between_the_passes, generation, one_on_each_rank_and_two_on_the_second, an_attack,
        an_attack_by_backward, a_penalty, a_penalty_on_gradients_of_weights, for_another_model, two_losses,
        two_forwards_then_two_backwards, one_pass_more_than_planned, as_many_as_the_rank_likes, all_before_the_step,
        of_some_weights,
    )
}  # fmt: skip


def average(model: nn.Module, group: dist.ProcessGroup) -> None:
    """As DDP(find_unused_parameters=True) does."""
    for p in model.parameters():
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used, group=group)
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size()
            dist.all_reduce(p.grad, group=group)


@lru_cache(maxsize=64)
def wanted(name: str, job: Job) -> dict[str, Tensor]:
    model, group = build(), dist.new_group()
    optimizer = optimizer_for(job.optimizer, model)
    for step in range(job.steps):
        LOOPS[name](model, step, contextlib.nullcontext)
        average(model, group)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group(group)
    return {key: value.clone() for key, value in model.state_dict().items()}


@lru_cache(maxsize=8)
def profile_of(optimizer: str) -> mdcs.Profile:
    model = build()
    units = mdcs.partition(model, POLICY)
    return merge_profiles(
        measure_profile(
            model, units, lambda: loss(model(batch(0))), optimizer_for(optimizer, model), world=dist.get_world_size(),
            link=mdcs.Link.uniform(1.0, 50.0), iterations=1,
        )
    )  # fmt: skip


def train(name: str, job: Job, plan: mdcs.Plan) -> tuple[dict[str, Tensor], Counter[str]]:
    model = build()
    optimizer = optimizer_for(job.optimizer, model)
    with mdcs.parallelize(model, optimizer, plan, mdcs.partition(model, POLICY), timeout_s=20) as parallel:
        for step in range(job.steps):
            LOOPS[name](model, step, parallel.no_sync)
            parallel.step()
            optimizer.zero_grad()
        state = parallel.state_dict()
        records = parallel.records(flush=True)
        account = parallel._engine.account
        assert all(size >= 0 for size in account.live.values()), account.live
    return state, Counter(word for record in records for word in record.departures)


HOWS = [
    How(strategy, "wfbp", budget=budget, cross_iteration=across)
    for strategy in ("dp", "zero2", "sdp", "fsdp")
    for budget, across in ((None, True), (1.0, False))
] + [How("random", "random", seed=seed) for seed in (1, 2)] + [How("joint", "joint")]  # fmt: skip


def compare_all(name: str, job: Job, hows: list[How]) -> list[str]:
    wrong = []
    for how in hows:
        plan = plan_for(job, replace(how, budget=None), profile_of(job.optimizer))
        if how.budget is not None:
            plan = replace(plan, budget=min_feasible_budget(plan))
        try:
            state, seen = train(name, job, plan)
        except Exception as e:
            raise RuntimeError(f"{how}: {e}") from e
        if differing(state, wanted(name, job)):
            wrong.append(f"{how} {seen}")
    return wrong


@pytest.mark.parametrize("name", LOOPS)
def test_a_step_is_what_the_loop_does_in_it(two: Ranks, name: str):
    assert two.run(compare_all, name, Job("", steps=STEPS), HOWS, timeout_s=120) == [[], []]
