"""Measure how much faster the overlapping schedulers are than `sequential`, in paired and interleaved runs.

    mdcs bench [--rounds 3] [override …]        # make bench

Machines are shared and noisy. So every round runs all candidates, one after another, with one profile. The result is
the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from analysis import load_run
from experiments.config.checks import compose_config, positive, run_composing
from experiments.job import run as jobs
from experiments.job.profiles import Profiles

BASELINE = "sequential"
CANDIDATES = (BASELINE, "wfbp", "partitioning", "dear", "priority")


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs bench", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=positive, default=3, help="how often every candidate runs")
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. link.rate_gbit=0.5")
    arguments = parser.parse_intermixed_args()
    return run_composing(lambda: compare(arguments.rounds, arguments.overrides, Console(stderr=True)))


def compare(rounds: int, overrides: list[str], console: Console) -> int:
    """Run all candidates in every round and show the table. Return the exit code. Raises ConfigError."""
    profiles = Profiles()
    steps: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    overlap: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    with tempfile.TemporaryDirectory(prefix="mdcs-bench-") as folder:
        for round_ in range(rounds):
            for name in CANDIDATES:
                config = compose_config(["experiment=bench", f"scheduler={name}", *overrides])
                run = Path(folder) / f"{round_}-{name}"
                outcome = jobs.run(config, run, console, known=profiles)
                if not outcome.ok:
                    console.print(f"{name}: {outcome.reason}", markup=False)
                    return 1
                row = load_run(run).row()
                steps[name].append(row["step_s"])
                overlap[name].append(row["overlap_ratio"])
                communication, compute = row["communication_s"] * 1e3, row["compute_s"] * 1e3
                facts = f"{row['strategy']}, communication {communication:.0f} ms, compute {compute:.0f} ms"
    show(steps, overlap, facts, rounds)
    return 0


def show(steps: dict[str, list[float]], overlap: dict[str, list[float]], facts: str, rounds: int) -> None:
    table = Table(title=f"emulated link, {facts}; medians of {rounds} rounds")
    for heading in ("scheduler", "step ms", "overlap ratio", f"{BASELINE} / it"):
        table.add_column(heading, justify="left" if heading == "scheduler" else "right")
    for name in CANDIDATES:
        ratios = [base / own for base, own in zip(steps[BASELINE], steps[name], strict=True)]
        table.add_row(
            name, f"{statistics.median(steps[name]) * 1e3:.1f}", f"{statistics.median(overlap[name]):.2f}",
            f"{statistics.median(ratios):.2f} ×",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())
