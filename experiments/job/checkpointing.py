"""Decide `model.checkpointing=auto`.

A plan is made with and one without recomputation, each with its own profile. The plan that is predicted to be faster
within the budget is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.config.schema import Config
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
    config: Config, folder: Path, console: Console, plan: Callable[[Config, Path], str]
) -> tuple[Config, str]:
    """Return the config with `model.checkpointing` decided, and the reason if no plan is possible (else empty).

    A config without auto is returned unchanged.

    plan: writes plan.json of a config into a folder and returns the reason of a failure, else "". The folders are
    `checkpointing-with` and `checkpointing-without` of the job's folder.
    """
    if config.model.checkpointing != "auto":
        return config, ""
    ways = dict(zip(_WAYS, ways_of(config), strict=True))
    found, reasons = dict[str, float](), dict[str, str]()
    for way, job in ways.items():
        own = folder / f"checkpointing-{way}"
        reasons[way] = plan(job, own)
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
