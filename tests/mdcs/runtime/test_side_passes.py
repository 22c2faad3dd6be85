"""Steps of any passes: several backward passes, passes without gradients, penalties, in and out of ``no_sync()``.

A loop is a function of a model, the step and a context for passes whose gradients wait. It runs with a plan, and as it is
on plain models whose gradients are averaged over the ranks before the update, as DDP does. Two ranks: bit for bit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mdcs
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import lacking, said
from tests.mdcs.runtime.training import How, Job, differing, measured, optimizer_for, plan_for, plans_of_half, seeded

on_two = OnTwo()
STEPS = 3
POLICY = mdcs.ByClass(("Sequential",))


class Net(nn.Module):
    """A stem, three blocks of which one has a frozen weight, a head. ``depth`` says how far a pass goes."""

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
    return torch.randn(4, 6, generator=seeded(step, number, dist.get_rank()))


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


def sharpness_aware(model: Any, step: int, no_sync: Context) -> None:
    """SAM: the gradient at weights a little uphill of these, which stay as they are."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    slopes = torch.autograd.grad(loss(model(batch(step))), list(trained.values()))
    length = torch.stack([slope.norm() for slope in slopes]).norm()
    uphill = {name: p + 0.05 * slope / length for (name, p), slope in zip(trained.items(), slopes, strict=True)}
    loss(torch.func.functional_call(model, uphill, (batch(step),))).backward()


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


def in_reentrant_checkpoints(model: Any, step: int, no_sync: Context) -> None:
    def again(number: int, depth: int) -> Tensor:
        x = batch(step, number).requires_grad_()
        return loss(checkpoint(model, x, depth, use_reentrant=True))

    with no_sync():
        again(0, 3).backward()
    first, second = again(1, 2), loss(model(batch(step, 2)))
    (first + second).backward()


def of_some_weights(model: Any, step: int, no_sync: Context) -> None:
    loss(model(batch(step))).backward(inputs=[p for p in model.parameters() if p.requires_grad][2:])


LOOPS: dict[str, Loop] = {
    loop.__name__: loop
    for loop in (
        pseudo_labels, a_reference_between_the_passes, generation, one_on_each_rank_and_two_on_the_second, an_attack,
        an_attack_by_backward, a_penalty, a_penalty_on_gradients_of_weights, sharpness_aware, for_another_model, two_losses,
        two_forwards_then_two_backwards, one_pass_more_than_planned, as_many_as_the_rank_likes, all_before_the_step,
        of_some_weights, in_reentrant_checkpoints,
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
    return measured(model, mdcs.partition(model, POLICY), lambda: loss(model(batch(0))), optimizer_for(optimizer, model))


def train(name: str, job: Job, plan: mdcs.Plan) -> tuple[dict[str, Tensor], Counter[str]]:
    model = build()
    optimizer = optimizer_for(job.optimizer, model)
    with mdcs.parallelize(model, optimizer, plan, mdcs.partition(model, POLICY), timeout_s=20) as parallel:
        for step in range(job.steps):
            LOOPS[name](model, step, parallel.no_sync if job.micro_steps == 1 else contextlib.nullcontext)
            parallel.step()
            optimizer.zero_grad()
        state = parallel.state_dict()
        records = parallel.records(flush=True)
        account = parallel._engine.account
        assert all(size >= 0 for size in account.live.values()), account.live
    return state, Counter(word for record in records for word in record.departures)


@on_two(*LOOPS)
def a_step_is_what_the_loop_does_in_it(name: str, micro_steps: int = 1) -> list[str]:
    wrong, job = [], Job("", micro_steps, steps=STEPS)
    for how, plan in plans_of_half(job, profile_of(job.optimizer), [*LOOPS].index(name) % 2):
        try:
            state, seen = train(name, job, plan)
        except Exception as e:
            raise RuntimeError(f"{how}: {e}") from e
        if differing(state, wanted(name, job)):
            wrong.append(f"{how} {seen}")
    return wrong


@on_two("two_losses", "two_forwards_then_two_backwards", "pseudo_labels")
def a_plan_with_as_many_micro_steps_as_backward_passes_needs_no_context(name: str) -> list[str]:
    """A step may have fewer."""
    return a_step_is_what_the_loop_does_in_it(name, 2)


@on_two(
    ("in_reentrant_checkpoints", False), ("two_forwards_then_two_backwards", False), ("an_attack_by_backward", True),
    ("one_pass_more_than_planned", True), ("all_before_the_step", True),
)  # fmt: skip
def the_first_step_tells_how_many_backward_passes_a_step_has(name: str, in_context: bool) -> list[str]:
    """Other passes are in tests/mdcs/profiler/test_first_passes.py."""
    model, job = build(), Job("", steps=STEPS)
    optimizer = optimizer_for(job.optimizer, model)
    units = mdcs.partition(model, POLICY)
    with mdcs.parallelize(model, optimizer, units=units, seconds=0.2, progress=False, timeout_s=20) as parallel:
        for step in range(job.steps):
            LOOPS[name](model, step, parallel.no_sync if in_context else contextlib.nullcontext)
            optimizer.step()
            optimizer.zero_grad()
        return differing(parallel.state_dict(), wanted(name, job))


def begun(strategy: str, timeout_s: float = 20.0) -> tuple[nn.Module, mdcs.Session]:
    model, job = build(), Job("")
    plan = plan_for(job, How(strategy, "wfbp"), profile_of(job.optimizer))
    optimizer = optimizer_for(job.optimizer, model)
    return model, mdcs.parallelize(model, optimizer, plan, mdcs.partition(model, POLICY), timeout_s=timeout_s)


# ---- two models


def play(generator: Any, judge: Any, step: int, no_sync: Context, end: Callable[[str], None]) -> None:
    """DCGAN's step: the generator's loss goes through the judge, whose gradients of it are dropped."""
    judge.zero_grad()
    with no_sync():
        loss(judge(batch(step)) - 1).backward()
    fake = generator(batch(step, 1)).repeat(1, 2)
    loss(judge(fake.detach())).backward()
    end("judge")
    with no_sync():
        loss(judge(fake) - 1).backward()
    end("generator")


@on_two("dp", "fsdp")
def the_loss_of_one_model_goes_through_another(strategy: str) -> list[str]:
    plain, group = {"generator": build(), "judge": build()}, dist.new_group()
    theirs = {name: optimizer_for("adam", model) for name, model in plain.items()}

    def end(name: str) -> None:
        average(plain[name], group)
        theirs[name].step()
        theirs[name].zero_grad()

    for step in range(STEPS):
        play(plain["generator"], plain["judge"], step, contextlib.nullcontext, end)
    (generator, one), (judge, other) = begun(strategy), begun(strategy)
    runs = {"generator": one, "judge": other}
    for step in range(STEPS):
        play(generator, judge, step, other.no_sync, lambda name: runs[name].step())
    found = []
    for name, run in runs.items():
        found += differing(run.state_dict(), plain[name].state_dict())
        run.close(whole=False)
    dist.destroy_process_group(group)
    return found


# ---- what has no correct execution


LATE = {
    "a second backward": ("came between the last backward pass of the step and step()", "`with parallel.no_sync():`"),
    "a look": ("a pass without gradients", "evaluate before that backward pass or after step()"),
    "an old graph": ("backward() through a forward pass of an earlier step",),
}


@on_two("dp", "fsdp")
def passes_through_weights_that_have_been_updated_are_refused(strategy: str) -> list[str]:
    wrong = []
    for late, parts in LATE.items():
        model, parallel = begun(strategy)
        first = loss(model(batch(0)))
        first.backward(retain_graph=True)

        def again() -> None:
            if late == "an old graph":  # noqa: B023
                parallel.step()  # noqa: B023
            with torch.no_grad() if late == "a look" else parallel.no_sync():  # noqa: B023
                model(batch(1)) if late == "a look" else first.backward()  # noqa: B023

        wrong += lacking(said(again), *parts)
        parallel.close(whole=False)
    return wrong


def at_another_place() -> None:
    """One rank looks at the model before its forward pass, the other one after it."""
    model, parallel = begun("fsdp", timeout_s=3)
    with parallel:
        for look in range(2):
            with torch.set_grad_enabled(look != dist.get_rank()):
                model(batch(0))


def test_ranks_that_look_at_the_model_at_different_places_say_so(two: Ranks):
    first, second = two.outcomes(at_another_place, timeout_s=60)
    assert "or a pass in no_sync(): this rank ran one, and another did not within 3 s" in first.message
    assert "evaluate on every rank, not under `if rank == 0:`" in first.message
    assert second.kind == "RunError"


test_passes_are_as_with_ddp_or_refused = on_two.as_test(timeout_s=120)
