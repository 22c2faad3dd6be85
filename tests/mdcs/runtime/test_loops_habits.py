"""Habits of loops: what stands around the steps, and what goes wrong in them. Several to a call."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing.process
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import how, lacking, one_step, said
from tests.mdcs.runtime.training import Job, Setup, Twin, differing, optimizer_for, parallel_for, planned, reference, setup

JOB = Job("tied", steps=3)
Step = Callable[[int], None]
on_two = OnTwo()

# ---- around the steps


def in_another_default_type(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        for i in range(JOB.steps):
            step(i)
    finally:
        torch.set_default_dtype(torch.float32)


def on_another_default_device(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    batch = made.batch(9, 0, 0)
    for i in range(JOB.steps):
        step(i)
        with torch.device("meta"):
            with parallel.evaluate(), torch.no_grad():
                made.loss(made.model, batch)
            with parallel.full_parameters(writeback=True):
                pass
            parallel.abandon()
            parallel.state_dict()


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return JOB.steps

    def __getitem__(self, i: int) -> torch.Tensor:
        if i >= JOB.steps:
            raise IndexError
        return torch.tensor(i)


def with_workers(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    """Workers that are forked while messages are in flight."""
    # The tests' ranks are daemons, and those may have no children.
    multiprocessing.process.current_process()._config.pop("daemon", None)
    for i in torch.utils.data.DataLoader(Numbers(), batch_size=None, num_workers=2):
        step(int(i))


def in_a_thread(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    thread = threading.Thread(target=lambda: [step(i) for i in range(JOB.steps)])
    thread.start()
    thread.join()


def profiled(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    with torch.profiler.profile(profile_memory=True):
        for i in range(JOB.steps):
            step(i)


def deterministic(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    """New memory is then filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        for i in range(JOB.steps):
            step(i)
    finally:
        torch.use_deterministic_algorithms(False)


def leaving_out_losses(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    """Batches whose loss is not finite, say: no backward pass."""
    for i in range(JOB.steps):
        made.loss(made.model, made.batch(88, 0, 0))
        parallel.abandon()
        step(i)


def compiled_later(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    step(0)
    made.model.compile(backend="eager")
    step(1)
    step(2)


def with_random_numbers(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    """The loop's are its own."""
    before = torch.get_rng_state()
    for i in range(JOB.steps):
        step(i)
    parallel.drain()
    assert torch.equal(torch.get_rng_state(), before)


def with_an_averaged_model(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    """An average is a plain model: its passes drive no plan."""
    with parallel.full_parameters():
        average = torch.optim.swa_utils.AveragedModel(made.model)
    for i in range(JOB.steps):
        step(i)
        with parallel.full_parameters():
            average.update_parameters(made.model)
    made.loss(average, made.batch(9, 0, 0)).backward()


def exported(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    for i in range(JOB.steps):
        step(i)
        with parallel.full_parameters(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.trace(made.model, made.batch(9, 0, 0)["tokens"])


def with_collectives(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    for i in range(JOB.steps):
        step(i)
        dist.barrier()
        dist.all_reduce(torch.ones(3))


def reloading(made: Setup, parallel: mdcs.Session, step: Step) -> None:
    for i in range(JOB.steps):
        parallel.load_state_dict(parallel.state_dict())
        step(i)


HABITS = [
    in_another_default_type, on_another_default_device, with_workers, in_a_thread, profiled, deterministic, leaving_out_losses,
    compiled_later, with_random_numbers, with_an_averaged_model, exported, with_collectives, reloading,
]  # fmt: skip


@on_two("fsdp", pytest.param("random", marks=pytest.mark.slow))
def habits_that_change_nothing(strategy: str) -> list[str]:
    found, wanted = list[str](), reference(JOB).state
    for habit in HABITS:
        with parallel_for(JOB, how(strategy)) as (made, parallel, optimizer):
            schedule = JOB.scheduler(optimizer)

            def step(number: int) -> None:
                one_step(made, parallel, number)
                schedule.step()  # noqa: B023

            habit(made, parallel, step)
            found += [f"{habit.__name__}: {name}" for name in differing(parallel.state_dict(), wanted)]
    return found


@on_two("random", pytest.param("fsdp", marks=pytest.mark.slow))
def change_options(strategy: str) -> list[str]:
    """Between iterations: by hand, and by schedules, one of which changes betas, too."""

    def by_hand(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        yield
        optimizer.param_groups[0]["weight_decay"] = 0.5
        yield
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        yield

    def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> Callable[[torch.optim.Optimizer], Iterator[None]]:
        def steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
            schedule = make(optimizer)
            for i in range(JOB.steps):
                yield
                schedule.step(*([1.0 + i] if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))

        return steps

    ways = {
        "by hand": by_hand,
        "one cycle": scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5)),
        "averaging": scheduled(lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2)),
        "plateau": scheduled(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    }
    found: list[str] = []
    for name, way in ways.items():
        plain = setup("tied")
        twin = Twin(plain.model, optimizer_for("adam", plain.model))
        with parallel_for(JOB, how(strategy)) as (made, parallel, ours), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for i, _ in enumerate(zip(way(twin.optimizer), way(ours), strict=True)):
                twin.step(lambda model: plain.loss(model, plain.batch(i, 0, dist.get_rank())))  # noqa: B023
                one_step(made, parallel, i)
            found += [f"{name}: {what}" for what in (*twin.differing(parallel.state_dict()), *(w.message for w in warned))]
    return found


@on_two()
def one_optimizer_for_two_models() -> list[str]:
    """Two models trained by one optimizer are one model to partition."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(part.model for part in (setup("tied"), setup("tied", blocks=2)))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return sum(part(tokens) for part in self.parts)

    made, (model, plain) = setup("tied"), (Both(), Both())
    twin, optimizer = Twin(plain, optimizer_for("adam", plain)), optimizer_for("adam", model)
    with planned(model, optimizer, lambda: made.loss(model, made.batch(0, 0, 0)), "fsdp", made.policy) as parallel:
        for step in range(3):
            made.loss(model, made.batch(step, 0, dist.get_rank())).backward()
            parallel.step()
            twin.step(lambda model: made.loss(model, made.batch(step, 0, dist.get_rank())))  # noqa: B023
        return twin.differing(parallel.state_dict())


# ---- refused

TAKEN = "weight.grad does not hold the gradient between backward and step()"
REFUSED: dict[str, tuple[str, ...]] = {
    "keep_the_graph()": ("norm.weight: backward(create_graph=True) is not supported",),
    "torch.func.grad(lambda scale: scale * loss())(torch.ones(()))": (
        "its forward runs inside of torch.func (grad)", "in parallel.full_parameters()",
    ),
    "backward(); [setattr(p, 'grad', torch.zeros(p.shape)) for p in model.parameters()]": (TAKEN,),
    "backward(); [setattr(p, 'grad', None) for p in model.parameters()]": (TAKEN,),
    "backward(); optimizer.zero_grad()": (TAKEN, "call zero_grad() after step()"),
    "backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)": (TAKEN, "parallelize(…, clip_norm=1.0)"),
    "backward(); [p.grad.data.mul_(0.5) for p in model.parameters() if p.grad is not None]": (  # as DINO does
        TAKEN, "each parameter by its own norm in step() of a subclass of the optimizer", "p.detach() in forward",
    ),
    "backward(); scaler.scale(torch.ones(1)); scaler.unscale_(optimizer)": (TAKEN,),
    "copy.deepcopy(optimizer)": ("weight cannot be used here (deepcopy)",),
    "nn.parallel.DistributedDataParallel(model)": ("weight cannot be used here (detach)",),
    "with parallel.evaluate(): parallel.state_dict()": ("state_dict() inside evaluate(): leave that with block first",),
    "with parallel.evaluate(), torch.enable_grad(): loss()": ("a pass with gradients inside evaluate()",),
    "with parallel.full_parameters(), parallel.evaluate(): pass": ("evaluate() inside full_parameters()",),
    "with parallel.full_parameters(): backward()": (
        "a pass with gradients inside full_parameters(): leave that with block to train",
    ),
    "with parallel.evaluate(): parallel.close()": ("close() inside evaluate()",),
    "loss(); parallel.state_dict()": ("state_dict() inside an iteration: call it after step()",),
    "loss(); parallel.drain()": ("step 2: drain() inside an iteration",),
    "parallel.step()": ("step 2: step() needs ", " before it"),
    "loss(); parallel.step()": ("step 2: step() needs ", " before it"),
    "parallel.close(); backward(); parallel.step()": ("step() after close(): call mdcs.parallelize() again",),
    "parallel.close(); parallel.state_dict()": ("state_dict() after close()",),
}  # fmt: skip
LATE: dict[str, tuple[str, ...]] = {
    "one = loss(); one.backward(retain_graph=True); one.backward()": (
        "backward ran again before optimizer.step()", "with parallel.no_sync()",
    ),
    "[one.backward() for one in [loss(0), loss(1)]]": ("backward ran again before optimizer.step()",),
    # The generator's loss goes through the discriminator, which is parallel, too.
    "backward(); backward(); parallel.step()": ("the model ran again before optimizer.step()", "with parallel.no_sync()"),
    "backward(); optimizer.param_groups[0]['lr'] *= 2; parallel.step()": (
        "lr of the optimizer's group 0 was changed between backward and step()",
    ),
    "model.blocks[1].requires_grad_(True); step()": ("weight: requires_grad changed while a plan runs",),
    "parallel.drain(); model.norm.requires_grad_(False); step()": ("norm.weight: requires_grad changed while a plan runs",),
    "model.norm.weight = nn.Parameter(torch.ones(6)); step()": ("norm.weight was replaced or removed while a plan runs",),
    "model.norm = nn.LayerNorm(6); step()": ("was replaced or removed while a plan runs",),
    "del model.blocks[2]; step()": ("step 2: blocks.2.0.weight was replaced or removed while a plan runs",),
    "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(3))]}); step()": (
        "the optimizer got another parameter group", "close()",
    ),
    "optimizer.register_step_post_hook(print); step()": ("a hook was put on optimizer.step()", "after parallel.step()"),
}  # fmt: skip
"""Noticed at the end of an iteration: where it has two micro-steps, one backward pass does not come to it."""


@on_two(*few([("fsdp", 1), ("dp", 2), ("dp", 1), ("zero2", 1), ("fsdp", 2)]))
def what_is_refused_in_a_sentence(strategy: str, micro_steps: int) -> list[tuple[str, str]]:
    """After a first step each; afterwards the run is closed."""
    wrong, job = list[tuple[str, str]](), Job("tied", micro_steps, steps=3)
    for snippet in REFUSED if micro_steps > 1 else {**REFUSED, **LATE}:
        with parallel_for(job, how(strategy)) as (made, parallel, optimizer):

            def loss(number: int = 1) -> torch.Tensor:
                return made.loss(made.model, made.batch(number, 0, 0))

            def keep_the_graph() -> None:
                with warnings.catch_warnings(action="ignore"):
                    loss().backward(create_graph=True)

            for micro in range(micro_steps):
                loss(micro).backward()
            parallel.step()
            names = {
                "loss": loss, "backward": lambda: loss().backward(), "keep_the_graph": keep_the_graph, "model": made.model,
                "step": lambda: one_step(made, parallel, 1), "optimizer": optimizer, "parallel": parallel, "torch": torch,
                "nn": nn, "copy": copy, "scaler": torch.amp.GradScaler("cpu"),
            }  # fmt: skip
            message = said(lambda: exec(snippet, names))  # noqa: B023
        queue = parallel._engine.wire.queue
        assert queue.done == queue.issued, f"{snippet}: what is issued was not finished"
        parts = {**REFUSED, **LATE}[snippet]
        right = message.startswith(("RunError: ", "UnsupportedModel: ")) and all(part in message for part in parts)
        if micro_steps == 2 and "zero_grad" in snippet:
            right = message == ""  # between two micro-steps it drops their gradients, as with DDP
        wrong += [] if right else [(snippet, message)]
    return wrong


# ---- ranks that do not do the same

ALONE: dict[str, Callable[[mdcs.Session], Any]] = {
    "evaluate()": lambda parallel: parallel.evaluate().__enter__(),
    "state_dict()": lambda parallel: parallel.state_dict(rank0_only=True),
    "full_parameters()": lambda parallel: parallel.full_parameters(rank0_only=True).__enter__(),
    "optimizer_state_dict()": lambda parallel: parallel.optimizer.state_dict(),
}


def on_rank_zero_alone(strategy: str, call: str) -> None:
    """As loops do that save or evaluate on rank 0."""
    with parallel_for(JOB, how(strategy), timeout_s=4) as (made, parallel, _):
        one_step(made, parallel)
        if dist.get_rank() == 0:
            ALONE[call](parallel)
        one_step(made, parallel, 1)
        one_step(made, parallel, 2)


@pytest.mark.parametrize(
    ("strategy", "call"),
    [
        ("fsdp", "evaluate()"), ("dp", "optimizer_state_dict()"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dp", "state_dict()"), ("zero2", "full_parameters()"))),
    ],
)
def test_a_call_on_one_rank_says_that_it_is_for_all(two: Ranks, strategy, call):
    first, second = two.outcomes(on_rank_zero_alone, strategy, call)
    assert first.kind == "RunError" and f"rank 0, step 2: {call}: " in first.message
    assert "call it on every rank: one did not within 4 s, or is gone" in first.message
    assert ("optimizer.state_dict() gathers from all ranks" in first.message) == (call == "optimizer_state_dict()")
    assert second.kind == "RunError" and second.message.startswith(("rank 1, step 2: ", "rank 1, step 3: "))
    two.stop()


def unequal_numbers_of_batches() -> str:
    """Rank 1's data end a step earlier than rank 0's."""
    with parallel_for(JOB, how("fsdp"), timeout_s=4) as (made, parallel, _):
        for step in range(2 - dist.get_rank()):
            one_step(made, parallel, step)
    return said(made.model.state_dict)


def test_a_rank_whose_data_end_early(two: Ranks):
    first, second = two.outcomes(unequal_numbers_of_batches)
    assert first.kind == "RunError" and "rank 0, step 2: " in first.message and "message" in first.message
    assert "is in pieces, parallel is closed and could not gather it" in second.value
    two.stop()


@on_two()
def ranks_that_call_different_things_say_so() -> list[str]:
    with parallel_for(JOB, how("fsdp")) as (made, parallel, _):
        one_step(made, parallel)
        if dist.get_rank() == 0:
            wanted = "rank 0, step 2: state_dict(): rank 1 is in evaluate(): call the same on every rank"
            return lacking(said(parallel.state_dict), wanted)
        wanted = "rank 1, step 2: evaluate(): rank 0 is in state_dict(): call the same on every rank"
        return lacking(said(lambda: parallel.evaluate().__enter__()), wanted)


@on_two(
    ("before", "parameters or buffers of rank 1 are not rank 0's in name, shape, strides or type"),
    ("later", "the ranks' buffers differ in name, shape or type"),
)
def buffers_that_differ_between_ranks(when: str, message: str) -> list[str]:
    rank, made = dist.get_rank(), setup("tied")
    if when == "before":
        made.model.register_buffer("mask", torch.ones(3 + rank))

    def train() -> None:
        with parallel_for(JOB, how("zero2"), made, timeout_s=5, broadcast_buffers=True) as (_, parallel, _):
            made.model.register_buffer("mask", torch.ones(3 + rank))
            one_step(made, parallel)

    return lacking(said(train), message)


# ---- the end


@on_two()
def an_interrupt_ends_the_run() -> list[str]:
    with contextlib.suppress(KeyboardInterrupt), parallel_for(JOB, how("fsdp")) as (made, parallel, _):
        one_step(made, parallel)
        raise KeyboardInterrupt
    message = said(lambda: made.loss(made.model, made.batch(0, 0, 0)))
    return lacking(message, "is in pieces, parallel is closed and could not gather it", "KeyboardInterrupt")


@on_two()
def a_process_group_that_is_destroyed_first() -> list[str]:
    with parallel_for(JOB, how("fsdp")) as (made, parallel, _):
        one_step(made, parallel)
        dist.destroy_process_group()
        closed = said(parallel.close)
    message = said(lambda: [p.norm() for p in made.model.parameters()])
    return [closed] * (closed != "") + lacking(message, "the process group was destroyed before close()")


test_loops_train_as_with_ddp_or_say_why_not = on_two.as_test(timeout_s=120)
