"""Measure the results that docs/results.md shows, and write the page.

    python -m benchmarks.results                    # all measurements (make results)
    python -m benchmarks.results slow_link          # one of them; KEY=VALUE are overrides of mdcs compare
    python -m benchmarks.results --quick            # one short round of each, to try it; no page
    python -m benchmarks.results --page             # only write the page anew

Each is `mdcs compare experiment=results_NAME`, whose candidates take turns. OUT/DATE/NAME.json keeps every repetition,
with machine, load, commit, versions and the overrides of each candidate. The page is made of the newest file of each
name.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results_page import newest, write_page
from experiments.config.files import groups
from mdcs.profile.cache import processor, version

ROOT = Path(__file__).resolve().parents[1]
NAMES = [name.removeprefix("results_") for name in groups()["experiment"] if name.startswith("results_")]
QUICK = ("compare.rounds=1", "run.steps=3", "run.unmeasured_steps=1")
PACKAGES = ("torch", "numpy", "fairscale", "deepspeed")


def main() -> int:
    """Measure, and write the page. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (default: all); or KEY=VALUE")
    parser.add_argument("--quick", action="store_true", help="one round of three steps, and no page")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results", help="folder; the page is beside it")
    asked = parser.parse_intermixed_args()
    overrides = [word for word in asked.given if "=" in word]
    names = [word for word in asked.given if word not in overrides]
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"no such result {unknown[0]}; results: {', '.join(NAMES)}")
    failed = 0
    for name in [] if asked.page else names or NAMES:
        if not asked.quick:
            _wait_until_quiet()
        failed |= _measure(name, [*(QUICK if asked.quick else ()), *overrides], asked.out / time.strftime("%Y-%m-%d"))
    if not asked.quick:
        print(f"the page is {write_page(newest(asked.out), asked.out.parent)}")
    return failed


def _measure(name: str, overrides: list[str], out: Path) -> int:
    """Run a comparison and keep what it measured. Return its exit code."""
    load = [os.getloadavg()]
    folder = Path("outputs/results", time.strftime("%Y-%m-%d_%H-%M-%S"), name).absolute()
    compare = [sys.executable, str(ROOT / "experiments/compare.py"), f"experiment=results_{name}", *overrides]
    code = subprocess.run([*compare, f"hydra.run.dir={folder}"], check=False).returncode
    if not (folder / "comparison.json").exists():
        return code or 1
    comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    load.append(os.getloadavg())
    about = groups()["experiment"][f"results_{name}"]
    document = {"name": name, "about": about, **surroundings(), "load": load, "comparison": comparison}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return code


def _wait_until_quiet(longest_s: float = 300.0) -> None:
    """Wait until the load of the last minute is below 1, or for so many seconds."""
    end = time.monotonic() + longest_s
    while os.getloadavg()[0] >= 1 and time.monotonic() < end:
        time.sleep(2)


def surroundings() -> dict[str, Any]:
    """Date, machine, commit and versions."""
    commit = _git("rev-parse", "--short", "HEAD") + (
        "-dirty" if _git("diff", "--stat", "HEAD", "--", ".", ":!docs") else ""
    )
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"), "commit": commit,
        "machine": {"processor": processor(), "system": platform.platform(terse=True)},
        "versions": {"python": platform.python_version(), **{name: version(name) or None for name in PACKAGES}},
    }  # fmt: skip


def _git(*arguments: str) -> str:
    """Output of git. Empty without a repository."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
