"""Table, pictures and trace of a sweep or a run; report, notebooks and trace are commands within.

    mdcs report SOURCE     # or python -m analysis SOURCE
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.executed import run_notebooks
from analysis.layers import write_layers
from analysis.load import load_run
from analysis.page import write_page
from analysis.report import write_report, write_trace
from analysis.sources import WANDB, runs
from analysis.table import print_table
from analysis.wandb_report import write_report as write_wandb_report

_SOURCE = "a sweep's or a run's folder (runs are found at any depth), or wandb:ENTITY/PROJECT[/GROUP]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on stderr for what cannot be read."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments[0] if arguments[:1] and arguments[0] in _COMMANDS else ""
    run, about = _COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"mdcs report {name}".strip(), description=about)
    try:
        near = difflib.get_close_matches(arguments[0], _COMMANDS, n=1) if arguments and not name else []
        if near and not Path(arguments[0]).exists():
            raise ValueError(f"{arguments[0]} is neither a folder nor a command; did you mean {near[0]}?")
        run(parser, arguments[1:] if name else arguments)
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def _pictures(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    others = (f"mdcs report {name}: {about[0].lower()}{about[1:]}" for name, (_, about) in _COMMANDS.items() if name)
    parser.epilog = "Other commands. " + " ".join(others)
    parser.add_argument("source", help=_SOURCE)
    parser.add_argument("--out", type=Path, help="where to write (default: the folder; of W&B's runs, here)")
    options = parser.parse_args(arguments)
    frame = runs(options.source)
    print_table(frame)
    for path in write_report(frame, options.out or _folder(options.source)):
        print(f"wrote {path}")


def _page(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("source", help=_SOURCE)
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: report.html in the folder)")
    options = parser.parse_args(arguments)
    title = options.source if options.source.startswith(WANDB) else Path(options.source).resolve().name
    print(f"wrote {write_page(runs(options.source), options.output or _folder(options.source) / 'report.html', title)}")


def _notebooks(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("source", nargs="?", help=f"{_SOURCE}; default: a small sweep of the tests")
    parser.add_argument("--out", type=Path, default=Path("results/notebooks"), help="the folder to write (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.source is not None:
        runs(options.source)  # what is no source at all is told once, not by every notebook
    for path, reason in run_notebooks(options.source, options.out):
        print(f"left out {path.name}: {reason}" if reason else f"wrote {path}")


def _trace(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("-o", "--output", type=Path, help="the file to write (default: RUN/trace.json)")
    options = parser.parse_args(arguments)
    print(f"wrote {write_trace(load_run(options.run), options.output or options.run / 'trace.json')}")


def _layers(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("folder", type=Path, help="the folder of a sweep or a run")
    for path in write_layers(parser.parse_args(arguments).folder):
        print(f"wrote {path}")


def _wandb(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    parser.add_argument("source", help="a sweep's folder, the address of a sweep or a run at W&B, or wandb:ENTITY/PROJECT/GROUP")
    print(write_wandb_report(parser.parse_args(arguments).source))


def _folder(source: str) -> Path:
    return Path() if source.startswith(WANDB) else Path(source)


_COMMANDS: dict[str, tuple[Callable[[argparse.ArgumentParser, Sequence[str]], None], str]] = {
    "": (
        _pictures, "Print the table of a sweep (or a run) and write table.csv, its pictures and the trace of its fastest run."
    ),
    "report": (
        _page, "Write a sweep as one HTML page that needs no network: best plans, curves, all runs, timelines, memory."
    ),
    "notebooks": (
        _notebooks, "Run the notebooks of analysis/notebooks on these runs and write them, with their output, as .ipynb files."
    ),
    "trace": (_trace, "Write a run's period, predicted and measured, as a trace for https://ui.perfetto.dev."),
    "layers": (_layers, "Print the memory of each layer for all runs of a sweep side by side, and draw it."),
    "wandb": (_wandb, "Write a sweep's report on W&B's server, with predictions beside measurements, and print its address."),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
