"""Decide `model.checkpointing=auto`.

A plan is made with and one without recomputation, each with its own profile. The plan that is predicted to be faster
within the budget is kept.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.config.schema import Config
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from mdcs.plan.plan import Plan
from mdcs.sizes import MIB

_WAYS = {"without": False, "with": True}


def ways_of(config: Config) -> list[Config]:
    """The two configs that auto chooses from. Without auto, the config alone."""
    if config.model.checkpointing != "auto":
        return [config]
    model: Any = config.model  # its class has the option, because it was set to auto
    return [dataclasses.replace(config, model=dataclasses.replace(model, checkpointing=way)) for way in _WAYS.values()]


def decide(
    config: Config, folder: Path, console: Console, *, known: Profiles | None = None, module: str = jobs.WORKER,
    start: jobs.Start | None = None,
) -> tuple[Config, str]:  # fmt: skip
    """Return the config with `model.checkpointing` decided, and the reason if no plan is possible (else empty).

    A config without auto is returned unchanged. The two plans are in the folders `checkpointing-with` and
    `checkpointing-without` of the job's folder.
    """
    if config.model.checkpointing != "auto":
        return config, ""
    known, ways = known or Profiles(), dict(zip(_WAYS, ways_of(config), strict=True))
    found, reasons = dict[str, float](), dict[str, str]()
    for way, job in ways.items():
        own = folder / f"checkpointing-{way}"
        reasons[way] = jobs.plan(job, own, console, known=known, worker=module, start=start)
        if not reasons[way]:
            prediction = Plan.from_json((own / "plan.json").read_text(encoding="utf-8")).prediction
            assert prediction is not None
            found[way] = prediction.step_s
            reasons[way] = f"{prediction.step_s * 1e3:.0f} ms predicted, {prediction.peak_bytes / MIB:.0f} MiB"
    told = "; ".join(f"{way}: {reason}" for way, reason in reasons.items())
    if not found:
        return config, f"model.checkpointing=auto: no plan either way. {told}"
    best = min(found, key=found.__getitem__)
    console.print(f"model.checkpointing=auto: {best}, because {told}", markup=False, highlight=False, soft_wrap=True)
    return ways[best], ""
