"""Measure the processor time of a message on a rank, and compare it with the backend alone for the same messages.

    mdcs dev messages cluster.ranks=2 collectives=ring
    mdcs dev messages cluster=shaped cluster.rate_gbit=2 cluster.ranks=4

Twelve blocks of 6 MiB, whose passes only wait (model=timed), are trained with fused Adam. Their messages are cut finer
and finer. The table has milliseconds of processor time per step: of the loop without messages (it has one update), of
the backend with a plan's messages one after another, and of mdcs. It also has the microseconds per message beyond loop
and backend, in total and outside of gloo's threads, whose time depends most on other work on the machine. All take
turns, and the least of the rounds counts, because other work only adds time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.place import require_alone

    require_alone(Path(__file__).name)

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn

import mdcs
from analysis.table import new_console, new_table
from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.worker import start
from experiments.tasks.timed import Timed
from launch import network, status
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.algorithms import Collectives
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.communicator import Communicator

MODEL = Timed(layers=12, block_mib=6, forward_ms=4, backward_ms=8, tensors=1)
CASES = (("zero2", 6.0), ("zero2", 1.0), ("zero2", 0.25), ("zero2", 0.0625), ("fsdp", 0.25), ("dp", 0.25))  # MiB a message
ROUNDS, STEPS = 3, 2
FILE = "messages.json"


def main() -> int:
    """Run the measurements of the command line and print the table. Return the exit code."""
    console = new_console(110)

    def measured(config: Config, folder: Path) -> str:
        if config.cluster.emulated or config.cluster.device != "cpu":
            return "cluster.name: processor time is that of messages between processes on CPUs"
        if config.cluster.ranks < 2:
            return "cluster.ranks: must be >= 2 to send messages, got 1"
        config.run.name = config.run.name or "messages"
        outcome = jobs.run(config, folder, console, only="plan", worker="experiments.dev.messages")
        if outcome.ok:
            console.print(table(json.loads((folder / FILE).read_text(encoding="utf-8")), config))
        return outcome.reason

    return app.run(app.Program(measured))


def measure(folder: Path) -> None:
    """Run the measurements of one rank. Rank 0 writes the results."""
    config = load(folder / "config.yaml")
    start(config)
    collectives = Collectives(config.collectives.named or "ring")
    rows = []
    for strategy, size in CASES:
        status.set(phase=f"{strategy}, {size:g} MiB a message")
        rows.append(row(strategy, size, collectives, config.link.depth or 2))
    if dist.get_rank() == 0:
        (folder / FILE).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def row(strategy: str, block_mib: float, collectives: Collectives, depth: int) -> dict[str, Any]:
    """Processor seconds of a step for loop, backend and mdcs: (in total, without gloo's threads), means over ranks."""
    plan = plan_of(strategy, block_mib, collectives, depth)
    loops: dict[str, Callable[[int], None]] = {"alone": alone(plan), "backend": Backend(plan).run}
    model, optimizer = made()
    taken: dict[str, list[tuple[float, float]]] = {"alone": [], "backend": [], "mdcs": []}
    with mdcs.parallelize(model, optimizer, plan, mdcs.partition(model, mdcs.ByClass(("Block",)))) as parallel:

        def with_plan(steps: int) -> None:
            for _ in range(steps):
                loss_of(model).backward()
                parallel.step()
            parallel.drain()
            parallel.records(flush=True)

        loops["mdcs"] = with_plan
        for name in list(loops) * (1 + ROUNDS):
            dist.barrier()
            before = processor_seconds()
            loops[name](STEPS)
            taken[name].append(tuple((b - a) / STEPS for a, b in zip(before, processor_seconds(), strict=True)))  # type: ignore[arg-type]
    seconds = torch.tensor([[min(column) for column in zip(*rounds[1:], strict=True)] for rounds in taken.values()])
    dist.all_reduce(seconds)
    mean = dict(zip(taken, (seconds / dist.get_world_size()).tolist(), strict=True))
    return {"strategy": strategy, "block_mib": block_mib, "messages": len(plan.messages), **mean}


def processor_seconds() -> tuple[float, float]:
    """Processor seconds of this process: (in total, without gloo's threads)."""
    whole, gloo = time.process_time(), 0
    for task in Path("/proc/self/task").iterdir():
        if "gloo" in (task / "comm").read_text():
            gloo += int((task / "schedstat").read_text().split()[0])
    return whole, whole - gloo / 1e9


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer."""
    model = MODEL.build().model
    return model, torch.optim.Adam(model.parameters(), fused=True)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(1, MODEL.layers)).sum()
    return loss


def plan_of(strategy: str, block_mib: float, collectives: Collectives, depth: int) -> mdcs.Plan:
    """The plan, the same on every rank. Its profile has an invented link."""

    def plan() -> mdcs.Plan:
        model, optimizer = made()
        profile = mdcs.measure_profile(
            model, mdcs.partition(model, mdcs.ByClass(("Block",))), lambda: loss_of(model), optimizer,
            world=dist.get_world_size(), link=mdcs.Link.uniform(4.0, 100.0, depth), iterations=1, collectives=collectives,
        )  # fmt: skip
        return mdcs.make_plan(profile, Uniform(strategy), Priority(block_mib))

    return on_rank_zero(plan)


def alone(plan: mdcs.Plan) -> Callable[[int], None]:
    """The loop without messages.

    Gradients go into flat buffers as they do with a plan, and one update covers all elements that the rank updates.
    """
    model, _ = made()
    share = 1 if plan.strategies[0].value == "dp" else plan.world
    flat = [torch.zeros_like(p) for p in model.parameters()]
    owned = [nn.Parameter(torch.zeros(len(gradient) // share)) for gradient in flat]
    optimizer = torch.optim.Adam(owned, fused=True)
    for part, gradient in zip(owned, flat, strict=True):
        part.grad = gradient[: len(part)]

    def run(steps: int) -> None:
        for _ in range(steps):
            loss_of(model).backward()
            for p, gradient in zip(model.parameters(), flat, strict=True):
                assert p.grad is not None
                torch.mul(p.grad, 1 / plan.world, out=gradient)
                p.grad = None
            optimizer.step()

    return run


class Backend:
    """The messages of a plan through the backend alone.

    They keep the plan's order and its number of messages in flight. Each message goes to and from its place in the
    model's parameters or gradients, which always exist. Nothing else is done.
    """

    def __init__(self, plan: mdcs.Plan) -> None:
        self.plan, self.world = plan, plan.world
        self.communicator = Communicator(plan.profile.collectives, dist.new_group(backend="gloo"))
        longest = max(plan.elements(m) for m in plan.messages)
        most = max(self.communicator.scratch(kind, longest) for kind in {m.kind for m in plan.messages})
        self.parameters, self.gradients = ([torch.zeros(unit.numel) for unit in plan.profile.units] for _ in range(2))
        self.scratch = [torch.zeros(most) for _ in range(plan.profile.link.depth)]
        self.shards = [torch.zeros(longest // self.world) for _ in self.scratch]

    def run(self, steps: int) -> None:
        """Send the messages of `steps` steps."""
        in_flight: deque[Callable[[], None]] = deque()
        for step in range(steps):
            for i, message in enumerate(self.plan.messages):
                if len(in_flight) == len(self.scratch):
                    in_flight.popleft()()
                in_flight.append(self.send(message, (step * len(self.plan.messages) + i) % len(self.scratch)))
        while in_flight:
            in_flight.popleft()()

    def send(self, message: Any, k: int) -> Callable[[], None]:
        """Start a message with the k-th buffers. Return the function that waits for it."""
        [(unit, block)], n = message.parts, self.plan.elements(message)
        start = self.plan.offsets[unit][block]
        buffer = (self.parameters if message.kind.is_gather else self.gradients)[unit][start : start + n]
        shard = self.shards[k][: n // self.world]
        scratch = self.scratch[k][: self.communicator.scratch(message.kind, n)]
        return self.communicator.launch(message.kind, buffer, scratch, shard).wait


def table(rows: list[dict[str, Any]], config: Config) -> Table:
    """Milliseconds per step, and microseconds per message."""
    link = config.cluster.shaped_link()
    shaped = f", link shaped to {link} ({network.congestion_control()})" if link else ""
    title = f"gloo, {config.cluster.ranks} ranks{shaped}: ms of processor time per step and rank"
    headings = ("strategy", "block KiB", "messages", "loop alone", "backend alone", "mdcs", "µs above", "not in gloo")
    made = new_table(title, headings, left=("strategy",), no_wrap=True)
    for row in rows:
        times = (f"{row[name][0] * 1e3:.0f}" for name in ("alone", "backend", "mdcs"))
        above = ((row["mdcs"][i] - row["backend"][i] - row["alone"][i]) / row["messages"] * 1e6 for i in range(2))
        size = f"{row['block_mib'] * 1024:.0f}"
        made.add_row(row["strategy"], size, str(row["messages"]), *times, *(f"{us:.0f}" for us in above))
    return made


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
    else:
        sys.exit(main())
