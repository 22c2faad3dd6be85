"""Updates block by block are those of one optimizer, to the bit, however the blocks are cut."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mdcs.model.elementwise import state_layouts
from mdcs.model.flat_optimizer import same_options
from mdcs.model.optimizers import Optimizers, Updates
from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.planner.schedulers import RandomOrder, StrategyAssignment
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.sharded_optimizer import ShardedOptimizer, later_step
from mdcs.runtime.storage import UnitStorage

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "dampened": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5),
    "fused sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "foreach": lambda groups: torch.optim.Adam(groups, lr=0.1, foreach=True),
    "fused": lambda groups: torch.optim.Adam(groups, lr=0.1, fused=True),
    "fused adamw": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True, maximize=True, fused=True),
    "fused, lr in a tensor": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), amsgrad=True, fused=True),
}
SIZES = (16, 8, 24)


def job(
    optimizer: str, strategy: str, rank: int, seed: int
) -> tuple[ShardedOptimizer, UnitStorage, Any, list[nn.Parameter], Any]:
    """One unit of 48 numbers in two groups (16 + 8 with weight decay, 24 without), and the same parameters alone."""
    torch.manual_seed(0)
    alone = [nn.Parameter(torch.randn(n)) for n in SIZES]
    ours = [nn.Parameter(p.detach().clone()) for p in alone]

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return OPTIMIZERS[optimizer](
            [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0, "lr": 0.02}]
        )

    unit = Unit("u", (24, 24), True, (0, 0), (0, 0))
    profile = Profile((unit,), (Slot(0, "F", 1.0, 0, 0), Slot(0, "B", 1.0, 0, 0)), 2, Link((0.0,) * 4, (0.0,) * 4))
    plan = RandomOrder(seed, max_blocks=4, fuse=0.0).schedule(StrategyAssignment(Job(profile), (Strategy(strategy),)))
    mine = make(ours)
    context = RunContext(plan, ErrorContext(rank))
    storage = UnitStorage(context, 0, [(str(i), p) for i, p in enumerate(ours)])
    storage.init_shards()
    updates = ShardedOptimizer(context, [storage], Updates(Optimizers(mine)))
    updates.make_runs()
    updates.make_state()
    return updates, storage, mine, alone, make(alone)


def by_run(updates: ShardedOptimizer) -> dict[tuple[int, int], list[tuple[slice, torch.optim.Optimizer]]]:
    """An optimizer of torch of its own for a copy of every run."""
    (optimizer,), groups = updates.optimizers.members, updates.optimizers.param_groups
    return {
        part: [(run.place, same_options(optimizer, groups[run.group], run.parameter.clone())) for run in runs]
        for part, runs in updates.runs.items()
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_message_is_updated_as_by_the_optimizer_itself(optimizer: str):
    """Fused kernels round differently where tensors are cut elsewhere, so the cuts are the same here."""
    for seed, strategy in itertools.product(range(4), ("dp", "zero2", "sdp")):
        updates, storage, mine, _, _ = job(optimizer, strategy, 0, seed)
        plainly = by_run(updates)
        for step in range(3):
            gradients = {(0, b): torch.randn_like(storage.owned_shard(b)) for b in range(len(storage.blocks))}
            gradients[0, 0][0] = -0.0
            updates.freeze_options()
            updates.step({part: gradient.clone() for part, gradient in gradients.items()}, 0.5)
            for (_, b), runs in plainly.items():
                for place, theirs in runs:
                    (p,) = theirs.param_groups[0]["params"]
                    p.grad = gradients[0, b][place] * 0.5
                    theirs.step()
                    theirs.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] * 0.5
                    assert torch.equal(storage.owned_shard(b)[place], p), (seed, strategy, step, b)
            for (_, b), runs in updates.runs.items():
                for run, (_, theirs) in zip(runs, plainly[0, b], strict=True):
                    for key, value in next(iter(theirs.state.values()), {}).items():
                        assert value is None or torch.equal(run.saved[key].view(torch.int32), value.view(torch.int32)), key
            for group in mine.param_groups:
                group["lr"] = group["lr"] * 0.5


class Reads(TorchDispatchMode):
    """Counts numbers that the host reads of a tensor, one by one: on CUDA it waits for each."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("unused", [(), (0,), (0, 1, 2)])
def test_parameters_that_no_rank_has_used_are_left_without_a_read_of_each(unused: tuple[int, ...]):
    """Gradients that underflow when they are scaled are gradients."""
    updates, storage, *_ = job("sgd", "dp", 0, 0)
    before, storage.unused = storage.flat_param.clone(), (0, 1, 2)
    flat = torch.full((sum(SIZES),), -1e-30)
    for i in unused:
        storage.places[i].view(flat).fill_(-0.0)
    updates.freeze_options()
    with Reads() as reads:
        updates.step({(0, b): flat[storage.block_slices[b]].clone() for b in range(len(storage.blocks))}, scale=1e-30)
    changed = [not torch.equal(place.view(before), place.view(storage.flat_param)) for place in storage.places]
    assert changed == [i not in unused and i < 2 for i in range(3)]  # by weight decay, which the third has not
    assert not reads.count


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_that_is_timed_is_one(optimizer: str):
    ours, theirs = (torch.randn(14, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    mine, its_own = (OPTIMIZERS[optimizer]([{"params": [p], "weight_decay": 0.1}]) for p in (ours, theirs))
    _, again = later_step(mine, state_layouts(mine)[0][1])
    for step in range(3):
        ours.grad = torch.randn(14)
        theirs.grad = ours.grad.clone()
        again()
        its_own.step()
        assert torch.equal(ours, theirs), step


def test_an_update_waits_for_a_compilation():
    """While torch compiles in one thread, Adam rounds otherwise in all."""
    from torch._dynamo.convert_frame import compile_lock

    updates, storage, *_ = job("adam", "dp", 0, 0)
    done = threading.Event()

    def update() -> None:
        updates.step({(0, 0): torch.ones(storage.blocks[0])})
        done.set()

    with compile_lock:
        thread = threading.Thread(target=update)
        thread.start()
        assert not done.wait(0.1)
    thread.join(10)
    assert done.is_set()
