"""Measure how many plans the simulator replays in a second, on one core.

    mdcs dev replays [--units 48] [--interference 0.2]

The plan has one message per unit and kind: units are zero2, sdp and fsdp in turn, the scheduler is wfbp. "Again"
replays a plan whose ledger and course exist already. "New" makes, checks and prepares a new plan every time, as a local
search does. Rates are of CPU time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.plan.worst_case import min_feasible_budget
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.simulator.simulate import replay

ROUNDS = 15


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs dev replays", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--interference", type=float, default=0.0, help="how much slower computing is beside a message")
    arguments = parser.parse_args()
    plan = example(arguments.units, arguments.interference)
    table = Table(title=f"{arguments.units} units, {len(plan.messages)} messages: replays per second", title_justify="left")
    for heading in ("what is asked for", "again", "new"):
        table.add_column(heading, justify="left" if heading == "what is asked for" else "right")
    bounded = dataclasses.replace(plan, budget=min_feasible_budget(plan))
    for what, of in (("period", plan), ("period, with a tight budget", bounded)):
        again, new = (rate(lambda: replay(plan_of()).period_s) for plan_of in (lambda: of, lambda: dataclasses.replace(of)))  # noqa: B023
        table.add_row(what, f"{again:,.0f}", f"{new:,.0f}")
    Console(width=100).print(table)
    return 0


def example(units: int, interference: float) -> Plan:
    """A transformer-like chain on 4 ranks, with a link that is about as busy as compute."""
    forward = [Slot(u, "F", 2e-3 + u * 1e-5, 10**6 * u, 10**6 * (u + 1)) for u in range(units)]
    backward = [Slot(u, "B", 4e-3 + u * 1e-5, 10**6 * (u + 1), 10**6 * (u + 1)) for u in reversed(range(units))]
    profile = Profile(
        units=tuple(Unit(f"block {u}", (10**6 + u,), True, (u, u), (units - 1 - u,) * 2) for u in range(units)),
        slots=(*forward, *backward),
        world=4,
        link=Link((2e-4, 1e-4, 1e-4, 1e-4), (5e-10,) * 4),
        optimizer=Optimizer("adam", 2, 4, 2, 1e-10, 1e-6),
        interference=interference,
    )
    strategies = (Strategy.zero2, Strategy.sdp, Strategy.fsdp)
    return Wfbp().schedule(StrategyAssignment(Job(profile), tuple(strategies[u % 3] for u in range(units))))


def rate(work: Callable[[], object], at_least_s: float = 0.02) -> float:
    """Calls per second of CPU time, in the best of several rounds of about ``at_least_s`` seconds each."""
    work()
    best, calls = 0.0, 1
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(calls):
            work()
        took = max(1e-9, time.process_time() - began)
        best = max(best, calls / took)
        calls = max(1, round(at_least_s * best))
    return best


if __name__ == "__main__":
    sys.exit(main())
