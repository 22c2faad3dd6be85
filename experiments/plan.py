"""Plan without training: print the plan that `train.py` would run, and what it is predicted to cost.

    python experiments/plan.py strategy=greedy scheduler=fusion budget.gib=0.5
    python experiments/plan.py strategy=greedy scheduler=dear budget.gib=0.5 profile=outputs/…/profile.json

The profile is measured with the job's own ranks, or read from `profile=PATH`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich import box
from rich.console import Console
from rich.table import Table

from experiments import app, jobs
from experiments.config import Config
from mdcs.plan import Plan
from mdcs.planner import floor_bytes

MIB = 2**20


def main(worker: str = jobs.WORKER) -> int:
    """Print the plan for what the command line asks for; returns the exit code."""
    console = Console()

    def plan(config: Config, folder: Path) -> str:
        outcome = jobs.run(config, folder, console, plan_only=True, worker=worker)
        if outcome.ok:
            show(Plan.from_json((folder / "plan.json").read_text(encoding="utf-8")), console)
            console.print(f"the plan is in {folder}", markup=False, highlight=False, soft_wrap=True)
        return outcome.reason

    return app.run(plan)


def show(plan: Plan, console: Console) -> None:
    """Print the plan's units, its prediction, and its memory by category."""
    console.print(units_table(plan))
    console.print(prediction_table(plan))
    console.print(memory_table(plan))


def units_table(plan: Plan) -> Table:
    """A row per unit: bytes, strategy, messages per kind. A message that fuses units counts for each of
    them.
    """
    table = Table(
        title=f"plan {plan.hash}: {plan.strategy}, {plan.scheduler}; {plan.world} ranks,"
        f" {len(plan.messages)} messages\ncollectives: {plan.profile.collectives}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("unit", "MB", "strategy", "messages"):
        table.add_column(heading, justify="right" if heading == "MB" else "left")
    kinds = [Counter[str]() for _ in plan.strategies]
    for message in plan.messages:
        for index in {unit for unit, _ in message.parts}:
            kinds[index][str(message.kind)] += 1
    for unit, strategy, counts in zip(plan.profile.units, plan.strategies, kinds, strict=True):
        megabytes = unit.numel * plan.profile.param_bytes / 1e6
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        table.add_row(unit.name, f"{megabytes:.2f}", str(strategy), shown)
    return table


def prediction_table(plan: Plan) -> Table:
    """What the replay of the plan predicts for one step. Raises ValueError when the plan was not replayed."""
    if plan.prediction is None:
        raise ValueError("the plan has no prediction")
    predicted = plan.prediction
    table = Table(title="predicted for one step", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("step ms", "compute ms", "communication ms", "exposed ms", "overlap ratio"):
        table.add_column(heading, justify="right")
    times = (predicted.step_s, predicted.compute_s, predicted.communication_s, predicted.exposed_s)
    table.add_row(*(f"{seconds * 1e3:.1f}" for seconds in times), f"{predicted.overlap_ratio:.2f}")
    return table


def memory_table(plan: Plan) -> Table:
    """Predicted bytes by category, each at its own peak, with the peak of their sum, the floor and the
    budget.
    """
    if plan.prediction is None:
        raise ValueError("the plan has no prediction")
    table = Table(title="memory per rank", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("category")
    table.add_column("MiB", justify="right")
    for category, size in plan.prediction.memory.items():
        table.add_row(category, f"{size / MIB:.2f}")
    table.add_section()
    floor = floor_bytes(
        plan.profile, micro_steps=plan.micro_steps, cross_iteration=plan.cross_iteration, reserve=plan.reserve
    )
    table.add_row("peak of the sum", f"{plan.prediction.peak_bytes / MIB:.2f}")
    table.add_row("floor: smallest feasible", f"{floor / MIB:.2f}")
    table.add_row("budget", "unlimited" if plan.budget is None else f"{plan.budget / MIB:.2f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
