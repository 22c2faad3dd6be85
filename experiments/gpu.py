"""Qualify a machine with a GPU: tests, mdcs and its peers, emulated worlds, a trade-off curve, overlap, the allocator.

    mdcs gpu [--out results/gpu] [--minutes 10] [--only worlds,curve]        # make gpu

Every part runs in its own process, the most important first, until the time is over. The program prints one table of
wanted and found values, and leaves gpu.json, gpu.png and the output of each part in `--out`. Where there is no GPU it
says so, and claims nothing. docs/gpu.md describes the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from analysis.table import new_console, new_table
from mdcs.sizes import GIB, MIB

SCHEMA = 1
NO_GPU = "there is no GPU here: nothing was run, and nothing is claimed"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A measurement of :mod:`experiments.gpu_parts`.

    - name: of the part.
    - seconds (s): time limit.
    - measure: name of the function.
    - environment: additional variables.
    """

    name: str
    seconds: float
    measure: str
    environment: Mapping[str, str] = field(default_factory=dict)


PARTS = (
    Part("tests", 200, "tests"),
    Part("world of one", 150, "world_of_one"),
    Part("worlds", 150, "worlds"),
    Part("curve", 180, "curve"),
    Part("overlap", 60, "overlap"),
    Part("allocator", 60, "allocator"),
    Part("allocator, expandable", 60, "allocator", EXPANDABLE),
    Part("recompute", 200, "recompute"),
    Part("fp16", 60, "fp16"),
    Part("checkpointing", 60, "checkpointing"),
    Part("compiled", 120, "compiled"),
    Part("ResNet-152", 90, "resnet"),
)


@dataclass
class Result:
    """Result of a part: its rows, or the reason why it has none."""

    name: str
    seconds: float
    rows: list[Row] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Finding:
    """A line of the table. ``ok`` is None where no value is wanted."""

    part: str
    what: str
    wanted: str
    found: str
    ok: bool | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/gpu"), help="where gpu.json, gpu.png and the output go")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long all parts may take together")
    parser.add_argument("--only", default="", help="names of parts, with commas")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # used by this program for its own parts
    arguments = parser.parse_args()
    console = new_console(110)
    import torch

    if not torch.cuda.is_available():
        console.print(NO_GPU)
        return 0
    if arguments.part:
        from experiments import gpu_job, gpu_parts, gpu_variants

        measure = getattr(gpu_parts, arguments.part, None) or getattr(gpu_variants, arguments.part)
        rows = measure(gpu_job.FULL, arguments.out)
        (arguments.out / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        return 0
    wanted = [name.strip() for name in arguments.only.split(",") if name.strip()]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"--only: no part {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    parts = [part for part in PARTS if not wanted or part.name in wanted]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = run_all(parts, arguments.out, arguments.minutes * 60, in_a_process, console)
    return report(results, machine(), arguments.out, console)


Run = Callable[[Part, Path, float], list[Row]]
"""(part, folder of the part, time limit in seconds) → rows. Raises RuntimeError with the reason of a failure."""


def run_all(parts: Sequence[Part], out: Path, seconds: float, run: Run, console: Console) -> list[Result]:
    """Run the parts one after another while there is time. A failed part does not end the others."""
    deadline = time.monotonic() + seconds
    results = []
    for part in parts:
        begin = time.monotonic()
        result = Result(part.name, 0.0)
        if deadline - begin < 10.0:
            result.reason = "no time was left"
        else:
            console.print(f"{part.name} …")
            try:
                folder = out / part.name.replace(", ", "-").replace(" ", "-")
                result.rows = run(part, folder, min(part.seconds, deadline - begin))
            except RuntimeError as e:
                result.reason = str(e)
        result.seconds = time.monotonic() - begin
        results.append(result)
    return results


def in_a_process(part: Part, folder: Path, seconds: float) -> list[Row]:
    """Run a part in a process of its own, and keep its output. Raises RuntimeError if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    written, output = folder / "rows.json", folder / "output.txt"
    written.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--part", part.measure, "--out", str(folder)]
    environment = {**os.environ, **part.environment}
    with output.open("w", encoding="utf-8") as file:
        try:
            subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done in {seconds:.0f} s: see {output}") from None
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
    """Write gpu.json and gpu.png, and print the table. Return 1 if a part failed or a wanted value was not reached."""
    found = findings(results)
    document = {
        "schema": SCHEMA, "machine": dict(about), "parts": [asdict(r) for r in results], "findings": [asdict(f) for f in found],
    }  # fmt: skip
    (out / "gpu.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
    console.print(table(found, about))
    for result in results:
        if result.reason:
            console.print(f"{result.name}: {result.reason}", markup=False)
    if picture(results, out / "gpu.png"):
        console.print(str(out / "gpu.png"), markup=False)
    console.print(str(out / "gpu.json"), markup=False)
    return int(any(r.reason for r in results) or any(f.ok is False for f in found))


def findings(results: Sequence[Result]) -> list[Finding]:
    """The lines of the table, for all parts that have rows."""
    say = {
        "tests": _of_tests, "world of one": _of_one, "worlds": _of_emulated, "curve": _of_curve, "overlap": _of_overlap,
        "allocator": _of_allocator, "allocator, expandable": _of_allocator, "recompute": _of_curve,
        "fp16": _of_variant, "checkpointing": _of_variant, "compiled": _of_variant, "ResNet-152": _of_resnet,
    }  # fmt: skip
    return [finding for r in results if r.rows for finding in say[r.name](r.name, r.rows)]


def _of_tests(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for row in rows:
        found = f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        out.append(Finding(part, row["what"], "all pass", found, row["failed"] == 0 and row["passed"] > 0))
    return out


def _of_one(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for row in rows:
        what = f"{row['engine']}: step, as a multiple of the plain loop's"
        ours = row["engine"].startswith("mdcs")
        found = f"{row['over_plain']:.3f} × ({row['step_s'] * 1e3:.1f} ms; device busy {row['busy']:.1%})"
        out.append(Finding(part, what, "≤ 1.02 ×" if ours else "", found, row["over_plain"] <= 1.02 if ours else None))
        if ours:
            share = row["host_s"] / row["step_s"]
            found = f"{share:.0%} ({row['host_s'] * 1e3:.1f} ms)"
            out.append(Finding(part, f"{row['engine']}: host's part of a step", "< 90 %", found, share < 0.9))
        else:
            out.append(Finding(part, f"{row['engine']}: host's part of a step", "", f"{row['host_s'] * 1e3:.1f} ms", None))
    return out


def _of_emulated(part: str, rows: Sequence[Row]) -> list[Finding]:
    errors = [row["measured_s"] / row["predicted_s"] - 1 for row in rows]
    worst = max(errors, key=abs)
    beyond = [row for row in rows if row["budget"] is not None and row["peak_bytes"] > row["budget"]]
    off = max(abs(row["peak_bytes"] - row["predicted_bytes"]) / row["predicted_bytes"] for row in rows)
    retries = sum(row["retries"] for row in rows)
    return [
        Finding(part, "step, measured against predicted: median", "within 5 %", f"{statistics.median(errors):+.1%}",
                abs(statistics.median(errors)) <= 0.05),
        Finding(part, "step, measured against predicted: worst", "within 5 %", f"{worst:+.1%}", abs(worst) <= 0.05),
        Finding(part, "peak against predicted: worst", "", f"{off:.1%}", None),
        Finding(part, "runs above their budget", "0", str(len(beyond)), not beyond),
        Finding(part, "allocator retries", "0", str(retries), retries == 0),
    ]  # fmt: skip


def _of_curve(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for name in dict.fromkeys(row["planner"] for row in rows):
        own = [row for row in rows if row["planner"] == name]
        best = min(own, key=lambda row: row["measured_s"])
        predicted = min(own, key=lambda row: row["predicted_s"])
        cost = predicted["measured_s"] / best["measured_s"]
        what = f"{name}: the predicted stop point beside the measured one"
        out.append(Finding(part, what, "≤ 1.05 ×", f"{cost:.3f} ×", cost <= 1.05))
    return out


def _of_overlap(part: str, rows: Sequence[Row]) -> list[Finding]:
    return [
        Finding(part, f"{row['plan']}: overlap ratio, ours and the profiler's", "within 0.05",
                f"{row['ours']:.2f} and {row['profiler']:.2f}", abs(row["ours"] - row["profiler"]) <= 0.05)
        for row in rows
    ]  # fmt: skip


def _of_allocator(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for row in rows:
        more = row["reserved_bytes"] / row["peak_bytes"] - 1
        pools = ", ".join(f"{size / MIB:.0f}" for size in row["pools"])
        out.append(Finding(part, f"{row['plan']}: reserved beyond requested", "", f"{more:.1%} (pools of {pools} MiB)", None))
        out.append(Finding(part, f"{row['plan']}: allocator retries", "0", str(row["retries"]), row["retries"] == 0))
    return out


def _of_variant(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for row in rows:
        found = f"{row['over_plain']:.3f} × ({row['plain_s'] * 1e3:.1f} ms)"
        out.append(Finding(part, f"{row['plan']}: step, as a multiple of the plain loop's", "", found, None))
        out.append(Finding(part, f"{row['plan']}: losses beside the plain loop's", "within 0.5 %", f"{row['losses']:.2%}",
                           row["losses"] <= 0.005))  # fmt: skip
    return out


def _of_resnet(part: str, rows: Sequence[Row]) -> list[Finding]:
    out = []
    for row in rows:
        error = row["peak_bytes"] / row["predicted_bytes"] - 1
        found = f"{row['peak_bytes'] / MIB:.0f} MiB, predicted {row['predicted_bytes'] / MIB:.0f}"
        out.append(Finding(part, f"{row['plan']}, {row['precision']}: peak", "within 1 %", found, abs(error) <= 0.01))
    return out


def table(found: Sequence[Finding], about: Mapping[str, str]) -> Table:
    """A table with one line per finding."""
    title = f"{about['device']} · torch {about['torch']} · CUDA {about['cuda']} · driver {about['driver']} · {about['date'][:10]}"
    made = new_table(title, headings := ("part", "what", "wanted", "found", ""), left=headings)
    last = ""
    for f in found:
        verdict = {True: "yes", False: "[bold red]no[/]", None: ""}[f.ok]
        made.add_row("" if f.part == last else f.part, f.what, f.wanted, f.found, verdict)
        last = f.part
    return made


def picture(results: Sequence[Result], path: Path) -> bool:
    """Draw measured over predicted step times, and the trade-off curves. Return False where neither was measured."""
    rows = {r.name: r.rows for r in results if r.rows}
    if not {"worlds", "curve", "recompute"} & set(rows):
        return False
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    worlds = rows.get("worlds", [])
    for world in dict.fromkeys(row["world"] for row in worlds):
        own = [row for row in worlds if row["world"] == world]
        ms = [[row[key] * 1e3 for row in own] for key in ("predicted_s", "measured_s")]
        left.plot(*ms, "o", label=f"{world} ranks, emulated")
    if worlds:
        ends = [min(r["predicted_s"] for r in worlds) * 1e3, max(r["predicted_s"] for r in worlds) * 1e3]
        left.plot(ends, ends, "--", color="grey", label="as predicted")
        left.legend()
    left.set(xlabel="step time, predicted (ms)", ylabel="step time, measured (ms)", title="GPT-2 350 M: steps of emulated worlds")
    curve = rows.get("curve", []) + rows.get("recompute", [])
    for i, name in enumerate(dict.fromkeys(row["planner"] for row in curve)):
        own = sorted((row for row in curve if row["planner"] == name), key=lambda row: row["peak_bytes"])
        peaks = [row["peak_bytes"] / GIB for row in own]
        measured, predicted = ([row[key] * 1e3 for row in own] for key in ("measured_s", "predicted_s"))
        right.plot(peaks, measured, "o-", color=f"C{i}", label=f"{name}, measured")
        right.plot(peaks, predicted, "o--", color=f"C{i}", mfc="none", label=f"{name}, predicted")
    if curve:
        right.set_xlim(left=0)
        right.legend(loc="upper center", fontsize="small")
    title = f"GPT-2 XL, {curve[0]['world']} ranks, emulated: over budgets" if curve else ""
    right.set(xlabel="measured peak memory (GiB)", ylabel="step time (ms)", title=title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True


if __name__ == "__main__":
    sys.exit(main())
