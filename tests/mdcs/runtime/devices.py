"""Parts that the tests of CPU and CUDA share: the executor's contract, training on one rank, emulated worlds, for any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mdcs
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.profiler.merging import merge_profiles
from mdcs.runtime.context import StepRecord
from mdcs.runtime.executor import Executor, run_on_comm_stream
from tests.mdcs.measured import measure_profile
from tests.mdcs.runtime.training import How, Job, Setup, plan_for

# ---- the executor's contract


def busy(device: torch.device) -> Tensor:
    """Some milliseconds of compute on a GPU, none to speak of on a CPU."""
    x = torch.ones(2048 if device.type == "cuda" else 8, 2048 if device.type == "cuda" else 8, device=device)
    for _ in range(20):
        x = x @ x / x.shape[0]
    return x


def communication_sees_compute_up_to_the_mark(executor: Executor, device: torch.device) -> None:
    x = torch.zeros(1 << 20, device=device)
    busy(device)
    x += 1
    mark = executor.record_event()
    with executor.on_comm_stream():
        executor.wait_event(mark)
        y = x.clone()
        there = executor.record_event()
    executor.wait_event(there)
    assert bool((y == 1).all())


def compute_sees_what_it_waits_for(executor: Executor, device: torch.device) -> None:
    y = torch.zeros(1 << 20, device=device)
    with run_on_comm_stream(executor):
        busy(device)
        y += 1
    assert float(y.sum()) == float(1 << 20)


def the_host_can_wait(executor: Executor, device: torch.device) -> None:
    busy(device)
    mark = executor.record_event()
    assert executor.wait(mark, 60.0) and executor.query(mark)


def a_pause_takes_its_time(executor: Executor, device: torch.device) -> None:
    executor.sleep(0.001)  # the first may measure something
    begin = executor.record_timestamp()
    executor.sleep(0.02)
    end = executor.record_timestamp()
    assert 0.018 <= executor.seconds(end) - executor.seconds(begin) < 2.0


def stamps_are_on_one_clock(executor: Executor, device: torch.device) -> None:
    begin = executor.record_timestamp()
    busy(device)
    middle = executor.record_event()
    with executor.on_comm_stream():
        executor.wait_event(middle)
        busy(device)
        sent = executor.record_timestamp()
        there = executor.record_event()
    executor.wait_event(there)
    end = executor.record_timestamp()
    times = [executor.seconds(s) for s in (begin, sent, end)]
    assert times == sorted(times) and times[-1] - times[0] < 60


def communicating_is_left_again(executor: Executor, device: torch.device) -> None:
    def stream() -> Any:
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    before = stream()
    with executor.on_comm_stream():
        inside = stream()
        with executor.on_comm_stream():
            assert stream() == inside
    assert stream() == before and (device.type == "cpu" or inside != before)


CONTRACT = (
    communication_sees_compute_up_to_the_mark,
    compute_sees_what_it_waits_for,
    the_host_can_wait,
    a_pause_takes_its_time,
    stamps_are_on_one_clock,
    communicating_is_left_again,
)


class Limited(Executor):
    """An executor whose allocator can be limited, and has tried again seven times."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int | None] = []

    def limit(self, size: int | None) -> None:
        self.limits.append(size)

    def retries(self) -> int:  # type: ignore[override]
        return 7


# ---- training on one rank


class Net(nn.Module):
    """Tied weights, a frozen layer, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.again = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.frozen = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.again(self.embedding(tokens))
        hidden = self.again(self.frozen(hidden)) + hidden
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def loss_of(model: nn.Module, step: int, device: torch.device) -> Tensor:
    tokens = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(step)).to(device)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(device)
    # One implementation for whole tensors and for pieces of them.
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)


def plain_run(device: torch.device, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = make(device)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def plan_of(device: torch.device, how: How, world: int = 1) -> mdcs.Plan:
    model, optimizer = make(device)
    profile = measure_profile(
        model, mdcs.partition(model, mdcs.ByLeaf()), lambda: loss_of(model, 0, device), optimizer, world=world,
        link=mdcs.Link.uniform(10.0, 10.0, how.depth), collectives=how.collectives,
    )  # fmt: skip
    return plan_for(Job("net"), how, merge_profiles(profile))


def parallel_run(device: torch.device, how: How, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    plan = plan_of(device, how, torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
    model, optimizer = make(device)
    units = mdcs.partition(model, mdcs.ByLeaf())
    losses = []
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=30) as parallel:
        parallel.records()  # from here on they have times
        for step in range(steps):
            loss = loss_of(model, step, device)
            loss.backward()
            parallel.step()
            losses.append(loss.item())
            if step == 1:
                with parallel.evaluate(), torch.no_grad():
                    loss_of(model, 99, device)
        state = parallel.state_dict()
        records = parallel.records(flush=True)
    assert [r.step for r in records] == list(range(1, steps + 1))
    assert all(r.times.step_s > 0 and r.times.compute_s > 0 for r in records)
    return losses, state


def equal(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


HOWS = [
    How(strategy, scheduler, seed=2)
    for strategy, scheduler in zip(("dp", "zero2", "sdp", "fsdp", "random", "fsdp", "random", "zero2"), SCHEDULERS, strict=False)
]


# ---- one process as a rank of many


@dataclass
class Emulated:
    """Actions of a rank of an emulated world: ``sent`` are (round, index) of messages in the order in which they were done."""

    plan: mdcs.Plan
    memory: dict[str, Any]
    slots: list[tuple[str, dict[str, int], dict[str, int]]]
    shards: int  # elements
    records: list[StepRecord]
    sent: list[tuple[int, int]]


def emulated_run(
    made: Setup, optimizer: torch.optim.Optimizer, how: How, emulate: mdcs.Emulation, link: mdcs.Link, *,
    steps: int = 5, clip_norm: float | None = None, micro_steps: int = 1,
) -> Emulated:  # fmt: skip
    """Profile, plan and train; the first two steps are warm-up."""
    units = mdcs.partition(made.model, made.policy)
    device = units[0].parameters[0][1].device

    def loss(step: int, micro: int = 0) -> Tensor:
        batch = {name: value.to(device) for name, value in made.batch(step, micro, emulate.rank).items()}
        return made.loss(made.model, batch)

    profile = measure_profile(
        made.model, units, lambda: loss(0), optimizer, world=emulate.world, link=link, iterations=2,
        collectives=how.collectives,
    )  # fmt: skip
    plan = plan_for(Job("", micro_steps, clip_norm=clip_norm), how, profile)
    sent = []
    with mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=30, clip_norm=clip_norm, emulate=emulate) as parallel:
        parallel.records()  # from here on they have times
        note = parallel._engine.recorder.ran

        def noted(lane: Any, index: int, begin: Any, end: Any, period: int = 0) -> None:
            sent.extend([(period, index)] if lane == "message" else ())
            note(lane, index, begin, end, period)

        parallel._engine.recorder.ran = noted  # type: ignore[method-assign]
        for step in range(steps):
            for micro in range(micro_steps):
                (loss(step, micro) / micro_steps).backward()
            parallel.step()
            if step == 1:
                parallel.reset_memory()
        in_order = len(sent)  # draining sends reductions ahead of their turn
        parallel.drain()
        slots = [(s.slot, dict(s.predicted), dict(s.measured or {})) for s in parallel.memory_by_slot()]
        shards = sum(s.shard.numel() for s in parallel._engine.storages if s.shard is not None)
        records = parallel.records(flush=True)
        return Emulated(plan, parallel.memory(), slots, shards, records[2:-1], sent[:in_order])
