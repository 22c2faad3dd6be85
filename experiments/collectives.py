"""Measure the collective algorithms against each other, on the ranks and the device of the config.

    python experiments/collectives.py cluster.ranks=2
    python experiments/collectives.py cluster=shaped cluster.ranks=4 cluster.rate_gbit=2

Prints median milliseconds by algorithm and message size, in which * is the fastest, what one rank sends and holds, and
at which rate it sends the largest message.
An emulated link would make all algorithms alike: this always measures the real one.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.job import app
from experiments.job import run as jobs
from launch import network
from mdcs.profile.algorithms import ALGORITHMS, KIND, Collectives
from mdcs.sizes import MIB

SIZES = tuple(2**power for power in range(16, 25, 2))  # 64 KiB to 16 MiB
FILE = "collectives.json"


def main() -> int:
    """Measure what the command line asks for and print the table; returns the exit code."""
    console = Console(width=110)

    def compare(config: Config, folder: Path) -> str:
        if config.cluster.emulated:
            return "cluster.name: emulated ranks send nothing to compare"
        if config.cluster.ranks < 2:
            return "cluster.ranks: must be >= 2 to compare collectives, got 1"
        config.run.name = config.run.name or "collectives"
        outcome = jobs.run(config, folder, console, only="plan", worker="experiments.collectives")
        if outcome.ok:
            rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
            console.print(table(rows, config.cluster.ranks, config.cluster.resolved_backend(), shaped_link(config)))
        return outcome.reason

    return app.run(compare)


def measure(folder: Path) -> None:
    """A rank's part; rank 0 writes the medians."""
    import torch.distributed as dist

    from experiments.job.worker import start
    from mdcs.calibrate.link_timing import measure_algorithms

    config = load(folder / "config.yaml")
    device = start(config)
    timings = measure_algorithms(device, ALGORITHMS[config.cluster.resolved_backend()], SIZES, repeats=15)
    if dist.get_rank() == 0:
        rows = [{"operation": t.operation, "algorithm": t.algorithm, "seconds": list(t.seconds.values())} for t in timings]
        (folder / FILE).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def shaped_link(config: Config) -> str:
    """For the title; empty for a link that is not shaped."""
    link = config.cluster.shaped_link()
    return f", link shaped to {link} ({network.congestion_control()})" if link else ""


def table(rows: list[dict[str, Any]], world: int, backend: str, link: str = "") -> Table:
    """``seconds`` of a row are by size; bytes sent and held are per byte of the message."""
    made = Table(title=f"{backend}, {world} ranks{link}: median ms", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("operation", "algorithm"):
        made.add_column(heading, no_wrap=True)
    for heading in (*(f"{s >> 10}K" if s < MIB else f"{s >> 20}M" for s in SIZES), "sent", "buffer", "Gbit/s"):
        made.add_column(heading, justify="right", no_wrap=True)
    for operation, kind in KIND.items():
        own = [row for row in rows if row["operation"] == operation]
        fastest = [min(seconds) for seconds in zip(*(row["seconds"] for row in own), strict=True)]
        for row in own:
            collectives = replace(Collectives.default(backend), **{operation: row["algorithm"]})
            share = (f"{of(kind, SIZES[-1], world) / SIZES[-1]:.2f}" for of in (collectives.sent, collectives.buffer))
            times = (f"{'*' if s == best else ''}{s * 1e3:.2f}" for s, best in zip(row["seconds"], fastest, strict=True))
            rate = collectives.sent(kind, SIZES[-1], world) * 8e-9 / row["seconds"][-1]
            made.add_row(operation, row["algorithm"], *times, *share, f"{rate:.2f}")
        made.add_section()
    return made


if __name__ == "__main__":
    if "RANK" in os.environ:
        measure(Path(sys.argv[1]))
    else:
        sys.exit(main())
