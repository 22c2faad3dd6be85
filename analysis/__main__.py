"""Table, pictures, page and trace of a sweep or a run; notebooks, layers and wandb are commands within.

    mdcs report SOURCE        # or python -m analysis SOURCE
    mdcs report ONE OTHER     # step times of two sweeps beside each other
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.comparison import compare
from analysis.page import write_page
from analysis.report import FORMATS, run_notebooks, write_layers, write_report
from analysis.sources import WANDB, runs, write_wandb_report
from analysis.table import print_comparison, print_table, write_csv

_SOURCE = "a sweep's or a run's folder (runs are found at any depth), or wandb:ENTITY/PROJECT[/GROUP]"
_COMMANDS = {
    "": ("Print the table of a sweep (or a run) and write it as table.csv; write its pictures, report.html (table and "
         "pictures on one page that needs no network), and the trace of its fastest run for https://ui.perfetto.dev. "
         "Of two sources: compare the step times of the plans that both have measured, and write comparison.csv.",
         _SOURCE, "the source; of W&B's runs, here"),
    "notebooks": ("Run the notebooks of analysis/notebooks on these runs and write them, with output, as .ipynb files.",
                  f"{_SOURCE}; default: a small sweep of the tests", "results/notebooks"),
    "layers": ("Print the memory of each layer for all runs of a sweep side by side, and draw it.",
               "the folder of a sweep or a run", ""),
    "wandb": ("Write a sweep's report on W&B's server, with predictions beside measurements, and print its address.",
              "a sweep's folder, the address of a sweep or a run at W&B, or wandb:ENTITY/PROJECT/GROUP", ""),
}  # fmt: skip
"""By command: its work, its input, and the folder that it writes unless another is asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 with one line on stderr for what cannot be read."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    command = arguments[0] if arguments and arguments[0] in _COMMANDS else ""
    try:
        near = difflib.get_close_matches(arguments[0], _COMMANDS, n=1) if arguments and not command else []
        if near and not Path(arguments[0]).exists() and not arguments[0].startswith(WANDB):
            raise ValueError(f"{arguments[0]} is neither a folder nor a command; did you mean {near[0]}?")
        options = _parser(command).parse_args(arguments[1:] if command else arguments)
        for line in _run(command, options):
            print(line)
    except (OSError, ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 1
    return 0


def _parser(command: str) -> argparse.ArgumentParser:
    does, source, output = _COMMANDS[command]
    parser = argparse.ArgumentParser(prog=f"mdcs report {command}".strip(), description=does)
    if command:
        parser.add_argument("source", help=source, nargs="?" if command == "notebooks" else None)
    else:
        others = (f"mdcs report {name}: {does[0].lower()}{does[1:]}" for name, (does, *_) in _COMMANDS.items() if name)
        parser.epilog = "Other commands. " + " ".join(others)
        parser.add_argument("source", nargs="+", help=source)
        told = "kinds of pictures, of png, pdf and svg (default: png); tex: the table for LaTeX (booktabs)"
        parser.add_argument("--format", default=["png"], type=lambda words: words.split(","), help=told)
        told = "pictures for a paper: as wide as one column of a journal, or two, without titles"
        parser.add_argument("--columns", type=int, choices=(1, 2), default=0, help=told)
    parser.set_defaults(output=None)
    if output:
        parser.add_argument("-o", "--output", "--out", type=Path, help=f"the folder to write (default: {output})")
    return parser


def _run(command: str, asked: argparse.Namespace) -> Iterator[str]:
    """Run the command, and say line by line what was written."""
    source, output = asked.source, asked.output
    if command == "notebooks":
        if source is not None:
            runs(source)  # what is no source at all is told once, not by every notebook
        for path, reason in run_notebooks(source, output or Path("results/notebooks")):
            yield f"left out {path.name}: {reason}" if reason else f"wrote {path}"
    elif command == "wandb":
        yield write_wandb_report(source)
    elif command == "layers":
        yield from (f"wrote {path}" for path in write_layers(Path(source)))
    elif unknown := set(asked.format) - FORMATS:
        raise ValueError(f"--format: no such format {unknown.pop()}; formats: {', '.join(sorted(FORMATS))}")
    elif len(source) == 2:
        table = compare(*map(runs, source))
        print_comparison(table, source)
        yield f"wrote {write_csv(table, (output or Path()) / 'comparison.csv')}"
    elif len(source) > 2:
        raise ValueError(f"one source, or two to compare; got {len(source)}")
    else:
        frame, remote = runs(source[0]), source[0].startswith(WANDB)
        print_table(frame)
        folder = output or Path("." if remote else source[0])
        page = write_page(frame, folder / "report.html", source[0] if remote else Path(source[0]).resolve().name)
        yield from (f"wrote {path}" for path in [*write_report(frame, folder, asked.format, asked.columns), page])


if __name__ == "__main__":
    sys.exit(main())
