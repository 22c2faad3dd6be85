"""The command ``mdcs``: runs the programs of a checkout by name, from any folder.

    mdcs train strategy=greedy scheduler=fusion budget=0.5GiB
    torchrun --no-python --nproc-per-node 4 mdcs curve strategy=greedy

The wheel has the library alone, so the command needs the checkout that mdcs was installed from with ``pip install -e``.
"""

from __future__ import annotations

import ast
import difflib
import os
import runpy
import sys
from importlib import metadata
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parent.parent

_EXPERIMENTS = "train", "profile", "plan", "curve", "compare", "jobs", "export"
PROGRAMS = {name: f"experiments/{name}.py" for name in _EXPERIMENTS} | {"report": "analysis/__main__.py"}
"""File of each command, from the checkout's root."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command line: the name of a program, then its arguments. Return the exit code: 2 for an unknown name."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:  # mdcs help, mdcs help train
        arguments = [*arguments[1:2], "--help"]
    name = arguments[0] if arguments else "--help"
    if "--version" in arguments:
        print(f"mdcs {metadata.version('mdcs')}")
        return 0
    if not (_CHECKOUT / PROGRAMS["train"]).is_file():
        how = "clone the repository, and pip install -e '.[experiments]' there"
        print(f"mdcs: the programs are not in the wheel; {how}", file=sys.stderr)
        return 2
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "-sc":  # Hydra's completion of shells
        return _complete(arguments)
    path = PROGRAMS.get(name)
    if path is None:
        near = difflib.get_close_matches(name, PROGRAMS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(PROGRAMS)}"
        print(f"mdcs: no command {name}; {hint}", file=sys.stderr)
        return 2
    return _run(path, [f"mdcs {name}", *arguments[1:]])


def _run(path: str, argv: list[str]) -> int:
    sys.argv = argv
    sys.path[0] = str(_CHECKOUT)  # instead of the folder of the command
    try:
        runpy.run_path(str(_CHECKOUT / path), run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, int) or end.code is None:
            return end.code or 0
        raise
    return 0


def _complete(arguments: list[str]) -> int:
    """Print what a shell asks for: the script that it evaluates once, or the words that may follow ``$COMP_LINE``."""
    if "query" not in "".join(arguments):
        return _run(PROGRAMS["train"], ["mdcs", *arguments])
    words = os.environ.get("COMP_LINE", "").split(maxsplit=2)
    line = words[2] if len(words) > 2 else ""
    if len(words) < 2 or not (line or os.environ["COMP_LINE"][-1].isspace()):
        print(*PROGRAMS, "help")
    elif "job import app" in _source(path := PROGRAMS.get(words[1], "")):
        os.environ["COMP_LINE"] = f"mdcs {line}"
        return _run(path, ["mdcs", *arguments])
    return 0


def _help() -> str:
    lines = ["usage: mdcs COMMAND [--help] [GROUP=OPTION …] [KEY=VALUE …]", ""]
    lines += [f"  {name:<12} {_about(path)}" for name, path in PROGRAMS.items()]
    return "\n".join([*lines, "", "mdcs COMMAND --help explains a command, with all its options."])


def _source(path: str) -> str:
    return (_CHECKOUT / path).read_text(encoding="utf-8") if path else ""


def _about(path: str) -> str:
    """Return the first line of a program's docstring."""
    text = ast.get_docstring(ast.parse(_source(path))) or ""
    return text.partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
