"""Compare measured with predicted peaks under budgets from the floor to the peak of data parallelism.

    mdcs dev peaks [--models gpt2 llama bert resnet152] [override …]

Activations are recomputed as the plan decides (recompute=planned), so the floor is the one with recomputation. The ranks
of a model train some steps under each budget, one after another. The table has the peak of a rank: the replay's, the
ledger's as messages and slots really came, and what the allocator gave. Registered bytes are all but activations and
workspace. `--json FILE` writes all rows. The exit code is 1 if a job failed or a peak is not right.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.place import require_alone

    require_alone(Path(__file__).name)

import torch.distributed as dist
from rich.console import Console

import mdcs
from analysis.table import new_console, new_table
from experiments.config.checks import compose_config, load, run_composing
from experiments.job import run as jobs
from experiments.job.planning import floor_of, job_of
from experiments.job.worker import start
from experiments.job.workload import Workload
from launch import status
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.planner.pipeline import unsharded_bytes
from mdcs.profile.algorithms import Collectives
from mdcs.profile.recompute import NONE
from mdcs.profiler.consensus import merge_profiles, on_rank_zero
from mdcs.sizes import MIB

TEXT = "data=stdlib_bytes model.layers=8 model.width=128 model.sequence=128"
MODELS = {
    "gpt2": f"model=gpt2-tiny {TEXT}",
    "llama": f"model=llama-tiny {TEXT} model.inner=384",
    "bert": f"model=bert-tiny {TEXT}",
    "resnet152": "model=resnet152 data=digits model.width_divisor=8 model.image=64 model.classes=10 model.wrap_min_params=20000",
}
PLANNED = "strategy=greedy scheduler=priority recompute=planned collectives=ring cluster.threads=1 data.batch_size=4"
BUDGETS, WARMUP, STEPS = 8, 2, 3
FILE = "peaks.json"
REGISTERED = [category for category in CATEGORIES if category != "activations"]
WITHIN = 0.005
"""Difference of measured and predicted peaks that counts as right, relative to the predicted one."""

Row = dict[str, Any]


def main() -> int:
    """Run the jobs of the command line and show the table. Return the exit code."""
    parser = argparse.ArgumentParser(prog="mdcs dev peaks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rows, as JSON")
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. scheduler=dear")
    arguments = parser.parse_intermixed_args()
    return run_composing(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> int:
    """Run everything and show the rows. Return the exit code. Raises ConfigError."""
    console, rows, failed = Console(stderr=True), list[Row](), 0
    with tempfile.TemporaryDirectory(prefix="mdcs-peaks-") as folder:
        for model in arguments.models:
            config = compose_config([*f"{MODELS[model]} {PLANNED}".split(), *arguments.overrides])
            outcome = jobs.run(config, Path(folder) / model, console, only="plan", worker="experiments.dev.peaks")
            if outcome.ok:
                found = json.loads((Path(folder) / model / FILE).read_text(encoding="utf-8"))
                rows += [{"model": model} | row for row in found]
            else:
                failed += 1
                console.print(f"{model}: {outcome.reason}", markup=False, soft_wrap=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    show(rows)
    return 0 if not failed and all(map(is_right, rows)) else 1


# ---- the ranks


def measure(folder: Path) -> None:
    """Run the steps of one rank under each budget. Rank 0 writes the rows."""
    config = load(folder / "config.yaml")
    workload = Workload(config, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), start(config))
    batches = workload.batches()
    profile = merge_profiles(
        mdcs.measure_profile(
            workload.model, workload.units, lambda: workload.loss(next(batches)), workload.optimizer, world=workload.world,
            link=mdcs.Link.uniform(1.0, 50.0), collectives=Collectives(config.collectives.named or "ring"), iterations=1,
            recompute=True,
        )
    )  # fmt: skip
    job = job_of(config, profile)
    low, high = floor_of(config, job), unsharded_bytes(job)
    rows = []
    for i in range(BUDGETS):
        status.set(phase=f"budget {i + 1} of {BUDGETS}")
        budget = low + (high - low) * i // (BUDGETS - 1)
        plan = on_rank_zero(
            partial(mdcs.make_plan, job, config.strategy, config.scheduler, budget=budget, recompute=config.recompute)
        )
        rows.append(under(plan, workload) | {"floor": low, "kept_floor": mdcs.floor_bytes(job, "none")})
    if workload.writes:
        (folder / FILE).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def under(plan: mdcs.Plan, workload: Workload) -> Row:
    """Train some steps with a plan. Return the peaks in bytes, the highest of all ranks each, and the plan in words."""
    batches = workload.batches()
    gc.collect()
    with mdcs.parallelize(workload.model, workload.optimizer_of(workload.model), plan, workload.units) as parallel:
        for step in range(WARMUP + STEPS):
            workload.loss(next(batches)).backward()
            parallel.step()
            if step + 1 == WARMUP:
                parallel.drain()
                parallel.reset_memory()
        parallel.drain()
        memory = parallel.memory()
    ledger, measured = memory["predicted"], memory["measured"]
    off = sum(abs(measured[category] - ledger[category]) for category in REGISTERED)
    of_ranks: list[tuple[int, int, int]] = [(0, 0, 0)] * workload.processes
    dist.all_gather_object(of_ranks, (measured["total"], ledger["total"], off))
    highest, its_ledger, _ = max(of_ranks)
    assert plan.prediction is not None
    return {
        "budget": plan.budget, "strategies": _counted(strategy.name for strategy in plan.strategies),
        "recomputed": _counted(choice for choice in plan.recompute if choice != NONE),
        "replay": plan.prediction.peak_bytes, "ledger": its_ledger, "measured": highest,
        "registered_off": max(off for _, _, off in of_ranks),
    }  # fmt: skip


# ---- what is shown


def _counted(names: Iterable[str]) -> str:
    """Return how often each name comes, in words: ``3 dp, 5 fsdp``."""
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items())) or "none"


def is_right(row: Row) -> bool:
    """Whether the peak is at most the budget and the ledger's, registered bytes are the ledger's, and all are within `WITHIN`.
    """
    below = row["measured"] <= min(row["budget"], row["ledger"])
    return below and not row["registered_off"] and row["ledger"] - row["measured"] <= WITHIN * row["ledger"]


def show(rows: list[Row]) -> None:
    """Print a row per run."""
    numbers = ("replay", "ledger", "measured", "of the ledger", "registered off by")
    left = ("model", "units", "recomputed")
    table = new_table("peak of a rank in MiB", ("model", "budget", "units", "recomputed", *numbers), left)
    for row in rows:
        sizes = (f"{row[name] / MIB:.2f}" for name in ("replay", "ledger", "measured"))
        table.add_row(
            row["model"], f"{row['budget'] / MIB:.2f}", row["strategies"], row["recomputed"], *sizes,
            f"{row['measured'] / row['ledger']:.2%}", f"{row['registered_off']} bytes",
        )  # fmt: skip
    console = new_console(highlight=False, markup=False)
    console.print(table)
    for model, row in {row["model"]: row for row in rows}.items():
        floors = f"{row['kept_floor'] / MIB:.1f} to {row['floor'] / MIB:.1f} MiB ({row['floor'] / row['kept_floor'] - 1:+.0%})"
        console.print(f"{model}: the smallest feasible budget falls from {floors} by recomputation")
    right = f"{sum(map(is_right, rows))} of {len(rows)} right"
    console.print(f"{right}: at most budget and ledger, registered bytes exact, all within {WITHIN:.1%}")


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
    else:
        sys.exit(main())
