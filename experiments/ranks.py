"""Measure step time and processor time over the number of ranks: one job, run with each number.

    mdcs ranks experiment=timed-8                       # 2, 3, 4, 6 and 8 ranks
    mdcs ranks --ranks 2 4 8 --rounds 3 experiment=timed-8 strategy=zero2 scheduler=priority

Every round runs all numbers of ranks, one after another; figures are medians over rounds. The processor time is that of
all threads of rank 0 in a step. The bound is the structural one. Ranks that compute on shared cores slow each other
down, so this program is for compute that uses no core (`model=timed`). ranks.json and the runs are left in `--out`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich import box
from rich.console import Console
from rich.table import Table

import mdcs
from analysis import load_run
from analysis.table import WIDTH, milliseconds
from experiments.config.checks import compose_config, parse_with_overrides, positive, run_composing
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from mdcs.planner.bounds import bounds_of

SCHEMA = 1
COUNTS = [2, 3, 4, 6, 8]
BOUND_S = 20.0  # time limit of each of two solves
FIGURES = ("step_s", "predicted_step_s", "compute_s", "exposed_s", "stalled_s", "processor_s", "messages_total")


def main(module: str = jobs.WORKER) -> int:
    """Run the jobs of the command line and show the table. Return the exit code. The ranks run the module `module`."""
    parser = argparse.ArgumentParser(prog="mdcs ranks", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=positive, nargs="+", default=COUNTS, help="how many, one after the other")
    parser.add_argument("--rounds", type=positive, default=1, help="how often each number runs")
    parser.add_argument("--out", type=Path, default=Path("results/ranks"), help="the folder for what is written")
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. experiment=timed-8")
    arguments = parse_with_overrides(parser, sys.argv[1:])
    return run_composing(lambda: measure(arguments, module))


def measure(arguments: argparse.Namespace, module: str) -> int:
    """Run all jobs, write ranks.json and show the table. Return the exit code.

    Raises ConfigError before anything is started.
    """
    console, known, out = Console(stderr=True), Profiles(), arguments.out.resolve()
    configs = {ranks: compose_config([*arguments.overrides, f"cluster.ranks={ranks}"]) for ranks in arguments.ranks}
    runs: dict[int, list[Path]] = {ranks: [] for ranks in configs}
    for number in range(arguments.rounds):
        for ranks, config in configs.items():
            folder = out / "runs" / f"{number}-{ranks}"
            outcome = jobs.run(config, folder, console, known=known, worker=module)
            if not outcome.ok:
                console.print(f"{ranks} ranks: {outcome.reason}", markup=False, soft_wrap=True)
                return 1
            runs[ranks].append(folder)
    lines = [line(ranks, folders) for ranks, folders in runs.items()]
    model = next(iter(configs.values())).model.label
    link = next(iter(configs.values())).cluster.shaped_link()
    document = {"schema": SCHEMA, "model": model, "shaped_link": link, "rounds": arguments.rounds,
                "overrides": arguments.overrides, "lines": lines}  # fmt: skip
    (out / "ranks.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    show(document)
    return 0


def line(ranks: int, folders: list[Path]) -> dict[str, Any]:
    """Medians over the runs, in seconds; None for a figure that no run has."""
    rows = [load_run(folder).row() for folder in folders]
    figures: dict[str, Any] = {"ranks": ranks}
    for name in FIGURES:
        values = [float(row[name]) for row in rows if row[name] is not None]
        figures[name] = statistics.median(values) if values else None
    path = folders[0] / "plan.json"
    figures["bound_s"] = None
    if path.is_file():
        figures["bound_s"] = bounds_of(mdcs.Plan.from_json(path.read_text(encoding="utf-8")), BOUND_S).structural_s
    return figures


def show(document: dict[str, Any]) -> None:
    """Print a row per number of ranks on stdout."""
    link = f" behind {document['shaped_link']}" if document["shaped_link"] else ""
    table = Table(title=f"{document['model']}{link}, medians of {document['rounds']} rounds", title_justify="left",
                  box=box.SIMPLE_HEAD)  # fmt: skip
    for heading in ("ranks", "step ms", "predicted", "bound", "× bound", "compute", "exposed", "stalled", "CPU ms of a rank",
                    "messages", "CPU ms of all"):  # fmt: skip
        table.add_column(heading, justify="right")
    for each in document["lines"]:
        processor, bound, messages = each["processor_s"], each["bound_s"], each["messages_total"]
        table.add_row(
            str(each["ranks"]), milliseconds(each["step_s"]), milliseconds(each["predicted_step_s"]), milliseconds(bound),
            f"{each['step_s'] / bound:.3f}" if bound else "–", milliseconds(each["compute_s"]), milliseconds(each["exposed_s"]),
            milliseconds(each["stalled_s"]), milliseconds(processor), "–" if messages is None else f"{messages:.0f}",
            milliseconds(None if processor is None else processor * each["ranks"]),
        )  # fmt: skip
    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else WIDTH
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
