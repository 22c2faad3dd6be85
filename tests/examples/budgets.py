"""Budgets as parts of DDP's memory on models and programs: kept or refused, how soon, and whether a step exceeds one.

    python -m tests.examples.budgets [NAME…]        # two ranks here; a Markdown row for each model, as soon as it is known

Each model is profiled once. A cell is what the plan recomputes, or the refusal's smallest share, which then trains, too, while
one per cent less must be refused; the seconds are those from the profile to the plan or the refusal.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import warnings
from typing import Any
from unittest.mock import patch

import mdcs
from mdcs.api import autoplan, loop_plan
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.profile.recompute import NONE
from tests.examples.test_programs import EXAMPLES, PROGRAMS, losses_of, torchrun
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import optimizer_for, setup

SHARES = 90, 75, 60, 50, 40
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"samples": 8}, "bert": {"samples": 8}, "llama": {"samples": 8}, "resnet": {"samples": 8}, "frozen": {},
    "checkpointed": {"samples": 8}, "gpt2/leaf": {}, "tied": {}, "twice": {}, "pictures": {}, "line-64-64-64-8": {},
}  # fmt: skip
STEPS = 4


def train(name: str, **options: Any) -> None:
    """Train one of the tests' models, or run a program."""
    if name not in MODELS:
        with torchrun(), patch.object(mdcs, "parallelize", functools.partial(_with, mdcs.parallelize, options)):
            losses_of(name)
        return
    made = setup(name, **MODELS[name])
    optimizer = optimizer_for("adam", made.model)
    units = mdcs.partition(made.model, made.policy)
    with mdcs.parallelize(made.model, optimizer, units=units, seconds=0.5, progress=False, **options) as parallel:
        for step in range(STEPS):
            made.loss(made.model, made.batch(step, 0, parallel.rank)).backward()
            parallel.step()


def _with(real: Any, options: dict[str, Any], *arguments: Any, **given: Any) -> Any:
    return real(*arguments, **given | options)


def tried(name: str, share: int, profiles: dict[int, mdcs.Profile]) -> tuple[str, float, dict[int, mdcs.Profile]]:
    """Return a cell, the most seconds from a profile to its plan or refusal, and the profiles. Collective.

    ``profiles``: of each model of a program; measured where there is none.
    """
    most, plans, calls, began = 0.0, list[mdcs.Plan](), iter(range(9)), 0.0

    def profiled(*arguments: Any, **options: Any) -> mdcs.Profile:
        nonlocal began
        if (call := next(calls)) not in profiles:
            profiles[call] = mdcs.autoprofile(*arguments, **options | {"recompute": True, "budget": None})
        began = time.monotonic()
        return profiles[call]

    def planned(*arguments: Any, **options: Any) -> mdcs.Plan:
        nonlocal most
        try:
            plans.append(mdcs.autoplan(*arguments, **options))
        finally:
            most = max(most, time.monotonic() - began)
        return plans[-1]

    with patch.object(autoplan, "autoprofile", profiled), patch.object(loop_plan, "autoplan", planned):
        try:
            train(name, budget=f"{share}%", over_budget="raise", profiles=False)
        except InfeasibleBudget as error:
            return f"refused: {error}", most, profiles
        except mdcs.RunError as error:
            return f"**{error}**", most, profiles
    again = [sum(choice != NONE for choice in plan.recompute) for plan in plans]
    cell = ", ".join(f"{n} of {len(plan.strategies)}" if n else "kept" for n, plan in zip(again, plans, strict=True))
    return cell, most, profiles


def row(ranks: Ranks, name: str) -> str:
    """Return a model's row of the table."""
    profiles: dict[int, mdcs.Profile] = {}
    most = 0.0

    def cell(share: int) -> str:
        nonlocal profiles, most
        ranks.stop()  # what another run has left, such as the variables of a program, would count
        (found, seconds, profiles), _ = ranks.run(tried, name, share, profiles, timeout_s=300)
        most = max(most, seconds)
        return found

    cells = [cell(share) for share in SHARES]
    smallest = {int(re.findall(r"(\d+) %", each)[-1]) for each in cells if each.startswith("refused")}
    said = ", ".join(f"{each} %" for each in smallest)
    if smallest:
        less, right = cell(min(smallest) - 1), cell(min(smallest))
        is_right = len(smallest) == 1 and less.startswith("refused") and not right.startswith("refused")
        said += "" if is_right else f" **{less}**"
        said += f": {right}" if right.startswith("**") else ""
    cells = [re.sub(r"refused: .*? the smallest budget is (.*)", r"refused: \1", each) for each in cells]
    return f"| {name.split('/')[-1]} | {' | '.join(cells)} | {said} | {most:.1f} |"


def main(names: list[str]) -> None:
    """Print the table."""
    programs = [str(each) for each in (*sorted(PROGRAMS.glob("*.py")), EXAMPLES / "accelerate_loop.py")]
    ranks = Ranks(2)
    print("| model |", " | ".join(f"{share} %" for share in SHARES), "| smallest | s |\n|" + "---|" * (len(SHARES) + 3))

    for name in [each for each in (*MODELS, *programs) if not names or each in names or any(f"/{n}.py" in each for n in names)]:
        try:
            print(row(ranks, name), flush=True)
        except AssertionError as error:
            print(f"| {name} | {' '.join(str(error).split())[-1500:]} |", flush=True)
    ranks.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
