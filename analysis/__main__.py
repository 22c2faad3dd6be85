"""`python -m analysis SOURCE`, and the subcommands report, notebooks and trace."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.executed import run_notebooks
from analysis.load import load_run
from analysis.page import write_page
from analysis.report import write_report, write_trace
from analysis.sources import WANDB, runs
from analysis.table import print_table

_SOURCE = "a sweep's or a run's folder (runs are found at any depth), one of offline W&B runs, or wandb:ENTITY/PROJECT[/GROUP]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on stderr for what cannot be read."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["trace"]:
            return _trace(arguments[1:])
        if arguments[:1] == ["report"]:
            return _page(arguments[1:])
        if arguments[:1] == ["notebooks"]:
            return _notebooks(arguments[1:])
        return _pictures(arguments)
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 1


def _pictures(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis",
        description="Print the table of a sweep (or of one run) and write table.csv, its pictures and the trace of "
        "its fastest run.",
        epilog="python -m analysis report SOURCE writes one HTML page, python -m analysis notebooks SOURCE runs the notebooks, "
        "python -m analysis trace RUN writes the trace of one run.",
    )
    parser.add_argument("source", help=_SOURCE)
    parser.add_argument("--out", type=Path, help="where to write (default: the folder; of W&B's runs, here)")
    options = parser.parse_args(arguments)
    frame = runs(options.source)
    print_table(frame)
    for path in write_report(frame, options.out or _folder(options.source)):
        print(f"wrote {path}")
    return 0


def _page(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis report",
        description="Write a sweep as one HTML page that needs no network: best plans, curves, all runs, timelines, memory.",
    )
    parser.add_argument("source", help=_SOURCE)
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: report.html in the folder)")
    options = parser.parse_args(arguments)
    title = options.source if options.source.startswith(WANDB) else Path(options.source).resolve().name
    print(f"wrote {write_page(runs(options.source), options.output or _folder(options.source) / 'report.html', title)}")
    return 0


def _notebooks(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis notebooks",
        description="Run the notebooks of analysis/notebooks on these runs and write them, with their output, as .ipynb files.",
    )
    parser.add_argument("source", nargs="?", help=f"{_SOURCE}; default: a small sweep of the tests")
    parser.add_argument("--out", type=Path, default=Path("results/notebooks"), help="the folder to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    for path, reason in run_notebooks(options.source, options.out):
        print(f"left out {path.name}: {reason}" if reason else f"wrote {path}")
    return 0


def _folder(source: str) -> Path:
    return Path() if source.startswith(WANDB) else Path(source)


def _trace(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis trace",
        description="Write a run's period, predicted and measured, as a trace for https://ui.perfetto.dev.",
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: RUN/trace.json)")
    options = parser.parse_args(arguments)
    print(f"wrote {write_trace(load_run(options.run), options.output or options.run / 'trace.json')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
