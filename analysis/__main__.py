"""`python -m analysis FOLDER` and `python -m analysis trace RUN`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.load import load_run, load_sweep
from analysis.report import write_report, write_trace
from analysis.table import print_table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on stderr for what cannot be read."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["trace"]:
            return _trace(arguments[1:])
        return _report(arguments)
    except (OSError, ValueError) as error:
        print(f"analysis: {error}", file=sys.stderr)
        return 1


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis",
        description="Print the table of a sweep (or of one run) and write table.csv, its pictures and the trace of "
        "its fastest run.",
        epilog="python -m analysis trace RUN -o trace.json writes the trace of one run.",
    )
    parser.add_argument("folder", type=Path, help="a sweep's or a run's folder; runs are found at any depth")
    parser.add_argument("--out", type=Path, help="where to write (default: FOLDER)")
    options = parser.parse_args(arguments)
    frame = load_sweep(options.folder)
    print_table(frame)
    for path in write_report(frame, options.out or options.folder):
        print(f"wrote {path}")
    return 0


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
