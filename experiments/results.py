"""Measure the results that docs/results.md shows, and write the page.

    mdcs results                                    # all of conf/results/ (make results)
    mdcs results 'results.names=[slow_link]'        # one of them
    mdcs results results.quick=true                 # one short round of each, to try it; no page

Each is a comparison as by `mdcs compare results=NAME`, whose candidates take turns. OUT/DATE/NAME.json keeps every
repetition, with machine, load, commit, versions and the overrides of each candidate. The page is made of the newest file of
each name.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra.core.hydra_config import HydraConfig

from experiments.compare import Comparison
from experiments.config.checks import compose_config
from experiments.config.files import groups
from experiments.config.schema import Config, ConfigError
from experiments.job import app
from experiments.results_page import newest, write_page
from mdcs.model.code import version
from mdcs.profile.cache import processor

ROOT = Path(__file__).resolve().parents[1]
QUICK = ("compare.rounds=1", "run.steps=3", "run.warmup_steps=1")
PACKAGES = ("torch", "numpy", "fairscale", "deepspeed")


def main() -> int:
    """Run the program for the command line. Return the exit code."""

    def measure(config: Config, folder: Path) -> str:
        asked = config.results
        known = list(groups()["results"])
        names = known if asked.names is None else asked.names
        if unknown := [name for name in names if name not in known]:
            raise ConfigError("results.names", f"no such result {unknown[0]}; results: {', '.join(known)}")
        given = [each for each in HydraConfig.get().overrides.task if not each.startswith("results.")]
        out = folder if asked.quick else ROOT / asked.out
        reasons = []
        for name in names:
            overrides = [f"results={name}", *(QUICK if asked.quick else ()), *given]
            if reason := _measured(name, overrides, folder / name, out / time.strftime("%Y-%m-%d")):
                reasons.append(f"{name}: {reason}")
        if not asked.quick:
            print(f"the page is {write_page(newest(out), out.parent)}")
        return "; ".join(reasons)

    return app.run(app.Program(measure, own=("results", "compare")))


def _measured(name: str, overrides: list[str], folder: Path, out: Path) -> str:
    """Run a comparison and keep what it measured. Return the reason of a failure, empty if there is none."""
    config, load = compose_config(overrides), [os.getloadavg()]
    comparison = Comparison(config, [each for each in overrides if not each.startswith("compare.")], folder)
    reason = comparison.run()
    load.append(os.getloadavg())
    document = {
        "name": name, "about": groups()["results"][name], **surroundings(), "load": load, "seed": config.run.seed,
        "comparison": json.loads((folder / "comparison.json").read_text()),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return reason


def surroundings() -> dict[str, Any]:
    """Date, machine, commit and versions."""
    commit = _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("diff", "--stat", "HEAD", "--", ".", ":!docs") else "")
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
