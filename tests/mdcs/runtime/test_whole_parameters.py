"""Optimizers that need whole matrices or vectors train as with DDP, bit for bit on two ranks: each parameter has one owner."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.telemetry.memory_meter import ShimMeter
from tests.mdcs.optimizers import SEVERAL, WHOLE
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import lacking, said
from tests.mdcs.runtime.test_optimizer_state import differences
from tests.mdcs.runtime.training import How, Job, Setup, differing, parallel_for, setup

on_two = OnTwo()
STEPS = 4
HOWS = How("dp"), How("zero2", "priority", bytes=200), How("sdp", "dear"), How("fsdp"), How("random", "random")
BUDGETS = How("greedy", "priority", budget=1.3), How("joint", "joint", budget=1.5)


def optimizers_of(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    return {**WHOLE, **SEVERAL}[name]([p for p in model.parameters() if p.requires_grad])


@contextmanager
def parallel_with(name: str, how: How, model: str = "tied") -> Iterator[tuple[Setup, mdcs.Session, list[torch.optim.Optimizer]]]:
    made = setup(model)
    with parallel_for(Job(model, optimizer=f"several {name}"), how, made, optimizers_of(name, made.model)) as run:
        yield run


def train(made: Setup, model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range = range(STEPS)) -> list[float]:
    """The loop of people who have several optimizers, each with a schedule."""
    losses, schedules = [], [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step / 10)) for o in optimizers]
    for schedule in schedules if steps.start else ():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            schedule.step(steps.start)
    for step in steps:
        loss = made.loss(model, made.batch(step, 0, dist.get_rank()))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def with_ddp(name: str, model: str = "tied") -> tuple[list[float], dict[str, torch.Tensor], list[Any]]:
    made, group = setup(model), dist.new_group()
    optimizers = optimizers_of(name, made.model)
    ddp = nn.parallel.DistributedDataParallel(made.model, process_group=group)
    losses = train(made, ddp, optimizers)
    del ddp
    return losses, made.model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


CASES = [*((name, "tied") for name in {**WHOLE, **SEVERAL}), ("lamb", "pictures"), ("three", "mixed")]


@on_two(*CASES)
def it_trains_as_with_ddp_under_any_plan(name: str, model: str) -> list[Any]:
    losses, weights, states = with_ddp(name, model)
    found: list[Any] = []
    for how in (*HOWS, *BUDGETS) if name == "muon" else HOWS[CASES.index((name, model)) % 2 :: 2]:
        with parallel_with(name, how, model) as (made, parallel, optimizers):
            own = [] if train(made, made.model, optimizers) == losses else ["losses"]
            own += differing(parallel.state_dict(), weights)
            saved = [optimizer.state_dict() for optimizer in optimizers]
            own += [differences(a, b) for a, b in zip(saved, states, strict=True) if differences(a, b)]
        own += [differences(o.state_dict(), b) for o, b in zip(optimizers, states, strict=True) if differences(o.state_dict(), b)]
        own += differing(made.model.state_dict(), weights)
        found += [(how, own)] if own else []
    return found


@on_two("muon", "adafactor", "three")
def it_resumes_under_another_strategy(root: str, name: str) -> list[Any]:
    """Half the way under one strategy, the rest under another: from its checkpoint, and from its state dicts."""
    _, weights, _ = with_ddp(name)
    found: list[Any] = []
    for first, second in (("fsdp", "dp"), ("zero2", "sdp")):
        folder = Path(root) / first
        with parallel_with(name, How(first)) as (made, parallel, optimizers):
            train(made, made.model, optimizers, range(STEPS // 2))
            parallel.checkpoint(folder)
            half, saved = parallel.state_dict(), parallel.optimizer_state_dict(cpu=True)
        with parallel_with(name, How(second)) as (made, parallel, optimizers):
            train(made, made.model, optimizers, range(7, 8))  # something that must be forgotten
            assert mdcs.resume(parallel, folder) is not None
            train(made, made.model, optimizers, range(STEPS // 2, STEPS))
            found += differing(parallel.state_dict(), weights)
        with parallel_with(name, How(second)) as (made, parallel, optimizers):
            train(made, made.model, optimizers, range(7, 8))
            parallel.load_state_dict(half)
            for optimizer, own in zip(optimizers, saved if len(optimizers) > 1 else [saved], strict=True):
                optimizer.load_state_dict(own)
            train(made, made.model, optimizers, range(STEPS // 2, STEPS))
            found += differing(parallel.state_dict(), weights)
        if dist.get_rank() == 0:
            plain = setup("tied")
            theirs, read = optimizers_of(name, plain.model), mdcs.read_checkpoint(folder)
            plain.model.load_state_dict(read["model"])
            for optimizer, own in zip(theirs, read["optimizer"] if len(theirs) > 1 else [read["optimizer"]], strict=True):
                optimizer.load_state_dict(own)
            found += differing(plain.model.state_dict(), half)
    return found


def measure(name: str, strategy: str) -> tuple[int, int, float]:
    """Optimizer bytes of the ledger and of the allocator after two steps, and the padding of parameters."""
    with parallel_with(name, How(strategy)) as (made, parallel, optimizers):
        train(made, made.model, optimizers, range(2))
        parallel.drain()
        layouts, units = parallel.plan.profile.layouts, parallel.plan.profile.units
        padding = sum(layout.elements for layout in layouts) / sum(unit.numel for unit in units)
        return parallel.memory()["predicted"]["optimizer"], ShimMeter().live()["optimizer"], padding


@pytest.mark.parametrize("name", ["muon", "adafactor", "three"])
def test_its_state_is_in_the_ledger(two: Ranks, name: str):
    """To the byte where every rank has all, or all are elementwise; else on the rank that owns the most."""
    for strategy in ("dp", "fsdp"):
        found = two.run(measure, name, strategy)
        held = [own for _, own, _ in found]
        assert all(predicted >= own for predicted, own, _ in found), found
        assert max(held) == found[0][0] or name != "three" and strategy == "fsdp", found
        assert found[0][2] < 1.3


@on_two()
def each_optimizer_is_called_once_an_iteration() -> list[str]:
    with parallel_with("muon", How("fsdp")) as (made, parallel, (muon, adamw)):
        assert parallel.optimizers == (muon, adamw) and parallel.optimizer is muon

        def backward(step: int) -> None:
            made.loss(made.model, made.batch(step, 0, dist.get_rank())).backward()

        backward(0)
        adamw.step()  # in any order
        muon.param_groups[0]["lr"] *= 0.5
        wrong = lacking(said(muon.step), "lr of Muon was changed after the first optimizer's step()")
        muon.param_groups[0]["lr"] *= 2
        muon.step()
        backward(1)
        muon.step()
        wrong += lacking(said(muon.step), "step() of Muon was called twice, and that of AdamW not yet")
        adamw.step()
        backward(2)
        parallel.step()  # for all
        message = said(lambda: parallel.load_optimizer_state_dict(muon.state_dict()))
        wrong += lacking(message, "there are 2 optimizers, and 1 state dicts")
        assert [list(own["state"]) for own in parallel.optimizer_state_dict()] == [[*range(5)], [*range(9)]]
    made = setup("tied")
    ps = list(made.model.parameters())
    message = said(lambda: mdcs.parallelize(made.model, [torch.optim.SGD(ps[:2], lr=1.0), torch.optim.AdamW(ps[1:])]))
    return wrong + lacking(message, "is in SGD, too: each parameter has one optimizer")


def in_the_loop(ours: bool) -> Any:
    """Muon for hidden matrices and AdamW for the rest of a GPT-2, without a plan: the first step is measured."""
    made = setup("gpt2")
    named = [(name, p) for name, p in made.model.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.dim() == 2 and ".h." in name]
    rest = [p for _, p in named if not any(p is q for q in hidden)]
    optimizers = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)]
    if not ours:
        ddp = nn.parallel.DistributedDataParallel(made.model, process_group=dist.new_group())
        return train(made, ddp, optimizers), made.model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = mdcs.parallelize(made.model, optimizers, budget="floor+5%", seconds=0.5, progress=False, timeout_s=30)
    losses = train(made, made.model, optimizers)
    assert parallel.plan.prediction.peak_bytes <= parallel.plan.budget
    parallel.close()
    return losses, made.model.state_dict()


@on_two()
def a_muon_loop_needs_no_plan() -> list[str]:
    (losses, weights), (theirs, wanted) = (in_the_loop(ours) for ours in (True, False))
    return (["losses"] if losses != theirs else []) + differing(weights, wanted)


test_whole_parameters_train_as_with_ddp = on_two.as_test(timeout_s=300)
