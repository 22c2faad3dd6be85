"""Export a plan: write the nearest configuration of torch's FSDP2 as JSON, and show it.

    mdcs export outputs/first
    mdcs export outputs/first/plan.json --to fsdp2.json
    mdcs export outputs/first --format json

The folder is that of a run or of mdcs plan. The file is fsdp2.json beside the plan unless --to names another
one. In a loop of your own:

    from mdcs.export.fsdp2 import apply_plan, clip_grad_norm_, parameter_groups
    apply_plan(model, json.load(open("fsdp2.json")))                  # calls fully_shard
    optimizer = torch.optim.AdamW(parameter_groups(model))            # afterwards
    clip_grad_norm_(model.parameters(), 1.0)                          # if some units are replicated, or sharded within
    nodes

A plan for several hosts may shard units within each host. The mesh of such units is hosts x ranks, for instance 2 x 4.
docs/export.md has a loader of 20 lines that needs only torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console

from analysis.table import new_console, new_table
from launch.place import require_alone
from mdcs.export.document import document
from mdcs.plan.plan import Plan, PlanError


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the file of the plan that the command line names. Return the exit code, 2 for an unusable plan."""
    require_alone("mdcs export")
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="mdcs export", description=__doc__, formatter_class=form)
    parser.add_argument("plan", type=Path, help="folder of a run, or its plan.json")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="the file to write; default: fsdp2.json beside the plan"
    )
    parser.add_argument("--force", action="store_true", help="write over a file of another plan")
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="json prints the file and nothing else"
    )
    options = parser.parse_args(arguments)
    path: Path = options.plan / "plan.json" if options.plan.is_dir() else options.plan
    to: Path = options.to or path.with_name("fsdp2.json")
    try:
        made = document(Plan.from_json(path.read_text(encoding="utf-8")))
        text = json.dumps(made, indent=1)
        if not options.force and (other := _other(to, text)) is not None:
            print(f"--to: {to} is {other}: name another file, or add --force", file=sys.stderr)
            return 2
        to.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = f"{path}: {error.strerror}" if isinstance(error, OSError) else f"{path} is not a plan.json: {error}"
        print(f"plan: {said}; name the folder of a run, or its plan.json", file=sys.stderr)
        return 2
    except PlanError as error:
        print(f"plan: {path}: {error}", file=sys.stderr)
        return 2
    if options.format == "json":
        print(text)
        return 0
    console = new_console()
    show(made, console)
    console.print(f"written to {to}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _other(to: Path, text: str) -> str | None:
    """Describe the file that would be overwritten. None if there is none, or if it is an export of the same plan."""
    if not to.exists():
        return None
    there = to.read_text(encoding="utf-8", errors="replace")
    try:
        plan = json.loads(there)["plan"]
    except (ValueError, KeyError, TypeError):
        return "no export"
    return None if plan == json.loads(text)["plan"] else f"the export of another plan ({plan})"


def show(made: dict[str, Any], console: Console) -> None:
    rows = []
    for group in made["groups"]:
        ahead = (", ".join(group[f"{phase}_prefetch"]) for phase in ("forward", "backward"))
        rows.append([
            ", ".join(name or "(the model)" for name in group["modules"]),
            str(group["strategy"]) if group["units"] else "–",
            " x ".join(map(str, group["mesh"])), str(group["reshard_after_forward"]),
            ", ".join(dict.fromkeys(group["recompute"].values())) or "–", *ahead,
        ])  # fmt: skip
    title = f"plan {made['plan']} for {made['ranks']} ranks, as calls of fully_shard"
    headings = ("modules", "strategy", "mesh", "reshard_after_forward", "recompute", "gathers ahead: forward",
                "backward")  # fmt: skip
    console.print(new_table(title, headings, left=headings, rows=rows, overflow="fold"))


if __name__ == "__main__":
    sys.exit(main())
