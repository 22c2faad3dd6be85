"""Measure what a step costs that departs from its plan: processor and wall time beside steps that do not.

    torchrun --nproc-per-node 2 --no-python mdcs dev departures

Forty fsdp units of 64 x 64. Blocks of plain steps and of departing ones take turns; the table has medians of rank 0 per
step, the median of the pairs' differences, and the milliseconds that the run itself counts (``departed_s``). Of a demand
fetch only the first step counts: afterwards the unit stays whole. Both have the smallest budget, so that no gather for
backward is under way already.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from analysis.table import new_console, new_table
from mdcs.plan.worst_case import min_feasible_budget
from mdcs.planner.registry import SCHEDULERS
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profiler.consensus import merge_profiles, on_rank_zero
from mdcs.profiler.model_profile import measure_profile

UNITS, WIDTH, PAIRS, STEPS = 40, 64, 6, 4
ALL = tuple(range(UNITS))
AGAIN = "a freed layer again"
Step = Callable[["Net", mdcs.Parallel, int], None]


class Net(nn.Module):
    """Layers, called in the order of ``path``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in ALL)

    def forward(self, path: tuple[int, ...] = ALL) -> Tensor:
        x = torch.ones(32, WIDTH)
        for i in path:
            x = self.layers[i](x).tanh()
        return x.square().mean()


def along(path: Callable[[int], tuple[int, ...]]) -> Step:
    return lambda model, parallel, step: model(path(step)).backward()


def without_gradients(model: Net, parallel: mdcs.Parallel, step: int) -> None:
    with torch.no_grad():
        model()
    model().backward()


def two_losses(model: Net, parallel: mdcs.Parallel, step: int) -> None:
    loss = model()
    with parallel.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


def one_pass_more(model: Net, parallel: mdcs.Parallel, step: int) -> None:
    with parallel.no_sync():
        model().backward()
    model().backward()


def one_expert_of_four(step: int) -> tuple[int, ...]:
    return tuple(i + (i // 4 + step + dist.get_rank()) % 4 for i in ALL[::4])


PLAIN = along(lambda step: ALL)
STEPS_OF: dict[str, tuple[Step, int]] = {
    "nothing departs": (PLAIN, STEPS),
    "a layer left out": (along(lambda step: ALL[:20] + ALL[21:]), STEPS),
    "eight of 40 left out": (along(lambda step: ALL[:4] + ALL[12:]), STEPS),
    "30 of 40 left out, others on each rank (experts)": (along(one_expert_of_four), STEPS),
    "a layer twice in a row": (along(lambda step: ALL[:20] + (20,) + ALL[20:]), STEPS),
    f"{AGAIN}, the first time (demand fetch)": (along(lambda step: (*ALL, step % 38)), 1),
    f"{AGAIN}, from then on": (along(lambda step: (*ALL, 0)), STEPS),
    "a forward pass without gradients before": (without_gradients, STEPS),
    "one more loss, in no_sync()": (two_losses, STEPS),
    "one more forward and backward pass, in no_sync()": (one_pass_more, STEPS),
}  # fmt: skip


def main() -> None:
    """Run all kinds and print the table on rank 0."""
    parser = argparse.ArgumentParser(
        prog="mdcs dev departures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("needs ranks: torchrun --nproc-per-node 2 --no-python mdcs dev departures")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    headings = ("step", "processor", "plain", "more", "wall", "plain", "more", "counted")
    table = new_table("ms a step, medians of rank 0", headings, left=("step",))
    for name, (step, steps) in STEPS_OF.items():
        cpu, wall, counted = measure(step, steps, name.startswith(AGAIN))
        times = (f"{each:{form}}" for clock in (cpu, wall) for each, form in zip(clock, (".0f", ".0f", "+.0f"), strict=True))
        table.add_row(name, *times, f"{counted:.1f}")
    if dist.get_rank() == 0:
        new_console().print(table)
    dist.destroy_process_group()


def measure(departing: Step, steps: int, tight: bool = False) -> tuple[Any, Any, float]:
    """Return (departing, plain, difference) in milliseconds a step: of the processor, and of the wall; and those counted."""
    torch.manual_seed(0)
    model = Net()
    optimizer, units = torch.optim.Adam(model.parameters()), mdcs.partition(model, mdcs.ByLeaf())
    link = mdcs.Link.uniform(1.0, 50.0)
    alone = measure_profile(model, units, model, optimizer, world=dist.get_world_size(), link=link, iterations=2)
    profile = merge_profiles(alone)
    plan = on_rank_zero(lambda: mdcs.make_plan(profile, Uniform("fsdp"), SCHEDULERS["priority"]()))
    if tight:
        plan = replace(plan, budget=min_feasible_budget(plan))
    kinds: tuple[list[list[float]], list[list[float]]] = ([], [])
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=120) as parallel:
        for pair in range(-1, PAIRS):  # the first pair warms up
            for step, into in ((PLAIN, kinds[0]), (departing, kinds[1])):
                begin = time.process_time(), time.perf_counter()
                for i in range(steps):
                    step(model, parallel, (pair + 1) * steps + i)
                    parallel.step()
                parallel.drain()
                now = time.process_time(), time.perf_counter()
                into += [[1e3 * (b - a) / steps for a, b in zip(begin, now, strict=True)]] * (pair >= 0)
        counted = statistics.median([1e3 * r.departed_s for r in parallel.records(flush=True) if r.departures] or [0.0])
    plain, other = kinds
    out = []
    for clock in range(2):
        a, b = [s[clock] for s in other], [s[clock] for s in plain]
        more = [x - y for x, y in zip(a, b, strict=True)]
        out.append(tuple(map(statistics.median, (a, b, more))))
    return out[0], out[1], counted


if __name__ == "__main__":
    main()
