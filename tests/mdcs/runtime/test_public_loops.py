"""Loops in the style of public projects, with DistributedDataParallel and with a plan: the same but for lines README names."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.planner.priority import Priority
from mdcs.planner.strategies import RandomMix
from mdcs.profiler.consensus import merge_profiles, on_rank_zero
from mdcs.profiler.model_profile import measure_profile
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, Setup, plan_for, profile_of, setup

Losses = list[float]


def nano_gpt(made: Setup, ddp: nn.Module | None, parallel: mdcs.Session | None, optimizer: torch.optim.Optimizer) -> Losses:
    """A rate set by hand in every iteration, accumulation, clipping, a moving average, evaluation in between."""
    rank, steps, micro_steps = dist.get_rank(), 4, 2
    model = ddp or made.model
    with parallel.full_parameters() if parallel else contextlib.nullcontext():
        average = copy.deepcopy(made.model)
    losses: Losses = []
    for step in range(steps):
        rate = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 2 == 0:
            made.model.eval()
            with parallel.evaluate() if parallel else contextlib.nullcontext(), torch.no_grad():
                losses += [made.loss(made.model, made.batch(100 + i, 0, rank)).item() for i in range(2)]
            made.model.train()
        for micro in range(micro_steps):
            if ddp is not None:
                ddp.require_backward_grad_sync = micro == micro_steps - 1  # type: ignore[assignment]
            loss = made.loss(model, made.batch(step, micro, rank)) / micro_steps
            loss.backward()
        if parallel:
            parallel.step()
        else:
            nn.utils.clip_grad_norm_(made.model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * micro_steps)
        with parallel.full_parameters() if parallel else contextlib.nullcontext(), torch.no_grad():
            for ours, theirs in zip(average.parameters(), made.model.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
    with torch.no_grad():
        losses.append(made.loss(average, made.batch(200, 0, 0)).item())
    return losses


def fine_tuning(made: Setup, ddp: nn.Module | None, parallel: mdcs.Session | None, optimizer: torch.optim.Optimizer) -> Losses:
    """Frozen layers, warm-up, gradients zeroed first, the loss averaged over ranks for the log, the best weights kept."""
    rank = dist.get_rank()
    model = ddp or made.model
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    losses: Losses = []
    best, lowest = {}, math.inf
    for step in range(5):
        made.model.train()
        optimizer.zero_grad()
        loss = made.loss(model, made.batch(step, 0, rank))
        loss.backward()
        if parallel:
            parallel.step()
        else:
            optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 2)
        if losses[-1] < lowest:
            lowest = losses[-1]
            best = parallel.state_dict() if parallel else {k: v.clone() for k, v in made.model.state_dict().items()}
    losses += [float(value.double().sum()) for value in best.values()]
    return losses


def res_net(made: Setup, ddp: nn.Module | None, parallel: mdcs.Session | None, optimizer: torch.optim.Optimizer) -> Losses:
    """An evaluation in inference mode after every epoch, on rank 0's statistics; StepLR by epoch."""
    rank = dist.get_rank()
    model = ddp or made.model
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses: Losses = []
    for epoch in range(3):
        model.train()
        for step in range(2):
            loss = made.loss(model, made.batch(10 * epoch + step, 0, rank))
            if not parallel:
                optimizer.zero_grad()
            loss.backward()
            parallel.step() if parallel else optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.inference_mode(), parallel.evaluate() if parallel else contextlib.nullcontext():
            losses += [made.loss(model, made.batch(100 + i, 0, rank)).item() for i in range(2)]
        schedule.step()
    return losses


LOOPS: dict[str, tuple[Callable[..., Losses], Job]] = {
    "nano_gpt": (nano_gpt, Job("tied", 2, "adamw", clip_norm=0.5, double=True)),
    "fine_tuning": (fine_tuning, Job("frozen", double=True)),
    "res_net": (res_net, Job("resnet", optimizer="sgd", double=True)),
}


def both(name: str, strategy: str) -> float:
    loop, job = LOOPS[name]
    (plain, theirs), (made, ours) = _built(job), _built(job)
    ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
    wanted = loop(plain, ddp, None, theirs)
    units = mdcs.partition(made.model, made.policy)
    how = How(strategy, "random" if strategy == "random" else "priority", seed=2)
    plan = plan_for(job, how, profile_of(job, how, made, units, ours))
    with mdcs.parallelize(made.model, ours, plan, units, clip_norm=job.clip_norm, timeout_s=20) as parallel:
        found = loop(made, None, parallel, ours)
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(found, wanted, strict=True))


def _built(job: Job) -> tuple[Setup, Any]:
    made = setup(job.model, job.double)
    parameters = [p for p in made.model.parameters() if p.requires_grad]
    if job.optimizer == "adamw":
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return made, torch.optim.AdamW(groups, lr=1e-2)
    if job.optimizer == "sgd":
        return made, torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return made, torch.optim.Adam(parameters, lr=1e-2)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("strategy", ["dp", "zero2", "fsdp", "random"])
def test_public_loops_train_as_with_ddp(two: Ranks, name, strategy):
    assert max(two.run(both, name, strategy)) <= 1e-9


def losses_after_an_example(how: str) -> Losses:
    """Losses of an epoch with shuffling and dropout: DDP's, or a plan's, whose example batch was taken from the loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rows = torch.randn(24, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    if how == "ddp":
        trained: nn.Module = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
        step, context = optimizer.step, contextlib.nullcontext(None)
    else:
        with torch.random.fork_rng() if how == "apart" else contextlib.nullcontext():
            example = next(iter(loader))
        units, link = mdcs.partition(model, mdcs.ByLeaf()), mdcs.Link.uniform(1.0, 50.0)
        profile = merge_profiles(
            measure_profile(model, units, lambda: model(example).square().mean(), optimizer, world=2, link=link, iterations=1)
        )
        plan = on_rank_zero(lambda: mdcs.make_plan(mdcs.Job(profile), RandomMix(1), Priority()))
        trained, context = model, mdcs.parallelize(model, optimizer, plan, units, timeout_s=20)
        step = context.step
    losses: Losses = []
    with context:
        for batch in loader:
            optimizer.zero_grad()
            loss = trained(batch).square().mean()
            loss.backward()
            step()
            losses.append(loss.item())
    return losses


def test_an_example_batch_of_a_loader(two: Ranks):
    """A loader draws from torch's random numbers when it is iterated: docs/loops.md says to take an example apart from them."""
    ddp, apart, drawn = (two.run(losses_after_an_example, how) for how in ("ddp", "apart", "drawn"))
    assert apart == ddp and drawn != ddp
