"""Qualify a machine with a GPU: steps beside a plain loop's, DDP's and FSDP2's, overlap, the allocator.

    mdcs gpu [--out results/gpu] [--only overlap,fp16]        # make gpu, after the tests marked gpu

Every part runs in its own process, within its own time limit, in ten minutes together. The program prints one table of
wanted and found values, and leaves gpu.json and the output of each part in `--out`. Where there is no GPU it
says so, and claims nothing. docs/gpu.md describes the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from analysis.table import new_console, new_table
from experiments import flags
from mdcs.sizes import GIB, MIB

SCHEMA = 1
NO_GPU = "there is no GPU here: nothing was run, and nothing is claimed"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

Row = dict[str, Any]
Finding = tuple[str, str, str, bool | None]
"""What, the wanted and the found value, and whether it is as wanted; None where no value is wanted."""


# ---- what the rows of a part say


def _engines(rows: Sequence[Row], most: float | None = None) -> Iterator[Finding]:
    for row in rows:
        name, ours = row["engine"], row["engine"].startswith("mdcs")
        found = f"{row['over_plain']:.3f} × ({row['step_s'] * 1e3:.1f} ms)"
        judged = most if ours else None
        yield (f"{name}: step, as a multiple of the plain loop's", "" if judged is None else f"≤ {judged} ×", found,
               None if judged is None else row["over_plain"] <= judged)  # fmt: skip
        if ours:
            yield f"{name}: losses beside the plain loop's", "within 0.5 %", f"{row['losses']:.2%}", row["losses"] <= 0.005
        if "host_s" in row:
            share = row["host_s"] / row["step_s"]
            found = f"{share:.0%} ({row['host_s'] * 1e3:.1f} ms; device busy {row['busy']:.1%})"
            yield f"{name}: host's part of a step", "< 90 %" if ours else "", found, share < 0.9 if ours else None


def _overlap(rows: Sequence[Row]) -> Iterator[Finding]:
    for row in rows:
        found = f"{row['ours']:.2f} and {row['profiler']:.2f}"
        close = abs(row["ours"] - row["profiler"]) <= 0.05
        yield f"{row['plan']}: overlap ratio, ours and the profiler's", "within 0.05", found, close


def _allocator(rows: Sequence[Row]) -> Iterator[Finding]:
    for row in rows:
        more = row["reserved_bytes"] / row["peak_bytes"] - 1
        pools = ", ".join(f"{size / MIB:.0f}" for size in row["pools"])
        yield f"{row['plan']}: reserved beyond requested", "", f"{more:.1%} (pools of {pools} MiB)", None
        yield f"{row['plan']}: allocator retries", "0", str(row["retries"]), row["retries"] == 0


@dataclass(frozen=True)
class Part:
    """A measurement of :mod:`experiments.gpu_parts`.

    - name: of the part.
    - seconds (s): time limit.
    - measure: name of the function.
    - judge: rows -> findings.
    - environment: additional variables.
    """

    name: str
    seconds: float
    measure: str
    judge: Callable[[Sequence[Row]], Iterator[Finding]]
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part("world of one", 150, "world_of_one", partial(_engines, most=1.02)),
    Part("overlap", 60, "overlap", _overlap),
    Part("allocator", 60, "allocator", _allocator),
    Part("allocator expandable", 60, "allocator", _allocator, EXPANDABLE),
    Part("fp16", 60, "fp16", _engines),
    Part("checkpointing", 60, "checkpointing", _engines),
    Part("compiled", 120, "compiled", _engines),
)


@dataclass
class Result:
    """Result of a part: its rows, or the reason why it has none."""

    name: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    reason: str = ""


def main() -> int:
    """Run the parts of the command line. Return the exit code."""
    parser = flags.parser("gpu", __doc__)
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="where gpu.json and the output go")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # used by this program for its own parts
    arguments = parser.parse_args()
    console = new_console(110)
    import torch

    if not torch.cuda.is_available():
        console.print(NO_GPU)
        return 0
    if arguments.part:
        from experiments import gpu_loops, gpu_parts

        rows = getattr(gpu_parts, arguments.part)(gpu_loops.FULL, arguments.out)
        (arguments.out / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return 0
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"--only: no part {', '.join(unknown)}; there are {', '.join(known)}")
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = run_all(parts, arguments.out, in_a_process, console)
    return report(results, machine(), arguments.out, console)


def run_all(parts: Sequence[Part], out: Path, run: Callable[[Part, Path], list[Row]], console: Console) -> list[Result]:
    """Run the parts one after another. A failed part, for which ``run`` raises RuntimeError, does not end the others."""
    results = []
    for part in parts:
        console.print(f"{part.name} …")
        result, begin = Result(part.name), time.monotonic()
        try:
            result.rows = run(part, out / part.name.replace(" ", "-"))
        except RuntimeError as error:
            result.reason = str(error)
        result.seconds = time.monotonic() - begin
        results.append(result)
    return results


def in_a_process(part: Part, folder: Path) -> list[Row]:
    """Run a part in a process of its own, and keep its output. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    written, output = folder / "rows.json", folder / "output.txt"
    written.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part.measure, "--out", str(folder)]
    environment = {**os.environ, **part.environment}
    with output.open("w", encoding="utf-8") as file:
        try:
            subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=part.seconds, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done in {part.seconds:.0f} s: see {output}") from None
    if not written.exists():
        said = output.read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(f"{said[-1] if said else 'it has said nothing'}: see {output}")
    rows: list[Row] = json.loads(written.read_text(encoding="utf-8"))
    return rows


def machine() -> dict[str, str]:
    """Description of the machine and the software for the report."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {
        "device": f"{properties.name}, {properties.total_memory / GIB:.0f} GiB",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
    }


# ---- the report


def report(results: Sequence[Result], about: Mapping[str, str], out: Path, console: Console) -> int:
    """Write gpu.json, and print the table. Return 1 if a part failed or a wanted value was not reached."""
    found = findings(results)
    told = [dict(zip(("part", "what", "wanted", "found", "ok"), each, strict=True)) for each in found]
    document = {"schema": SCHEMA, "machine": dict(about), "parts": [asdict(r) for r in results], "findings": told}
    (out / "gpu.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    console.print(table(found, about))
    for result in results:
        if result.reason:
            console.print(f"{result.name}: {result.reason}", markup=False)
    console.print(str(out / "gpu.json"), markup=False)
    return int(any(r.reason for r in results) or any(ok is False for *_, ok in found))


def findings(results: Sequence[Result]) -> list[tuple[str, str, str, str, bool | None]]:
    """The lines of the table, for all parts that have rows: the part's name, and a finding."""
    judges = {part.name: part.judge for part in PARTS}
    return [(r.name, *finding) for r in results if r.rows for finding in judges[r.name](r.rows)]


def table(found: Sequence[tuple[str, str, str, str, bool | None]], about: Mapping[str, str]) -> Table:
    """A table with one line per finding."""
    title = f"{about['device']} · torch {about['torch']} · CUDA {about['cuda']} · driver {about['driver']} · {about['date'][:10]}"
    made = new_table(title, headings := ("part", "what", "wanted", "found", ""), left=headings)
    last = ""
    for part, what, wanted, value, ok in found:
        verdict = {True: "yes", False: "[bold red]no[/]", None: ""}[ok]
        made.add_row("" if part == last else part, what, wanted, value, verdict)
        last = part
    return made


if __name__ == "__main__":
    sys.exit(main())
