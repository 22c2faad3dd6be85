"""Measure how many plans the simulator replays in a second, on one core.

    python -m benchmarks.replays [--units 48] [--interference 0.2]

The plan has one message per unit and kind: units are zero2, sdp and fsdp in turn, the scheduler is wfbp. "Again"
replays a plan whose ledger and course exist already. "New" makes, checks and prepares a new plan every time, as a local
search does. Rates are of CPU time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import timeit
from collections.abc import Callable

from analysis.table import new_console, new_table
from benchmarks.planners import chain
from mdcs.plan.job import Job
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.schedulers import Wfbp
from mdcs.simulator.simulate import replay

ROUNDS, ROUND_S = 15, 0.02
STRATEGIES = (Strategy.zero2, Strategy.sdp, Strategy.fsdp)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=48)
    parser.add_argument("--interference", type=float, default=0.0, help="how much slower computing is beside a message")
    asked = parser.parse_args()
    job = Job(chain(asked.units, 0, ratio=1.0, interference=asked.interference))
    plan = Wfbp().schedule(StrategyAssignment(job, tuple(STRATEGIES[u % 3] for u in range(asked.units))))
    title = f"{asked.units} units, {len(plan.messages)} messages: replays per second"
    table = new_table(title, ("what is asked for", "again", "new"), left=("what is asked for",))
    bounded = dataclasses.replace(plan, budget=min_feasible_budget(plan))
    for what, of in (("period", plan), ("period, with a tight budget", bounded)):
        again = rate(lambda plan=of: replay(plan).period_s)  # type: ignore[misc]
        new = rate(lambda plan=of: replay(dataclasses.replace(plan)).period_s)  # type: ignore[misc]
        table.add_row(what, f"{again:,.0f}", f"{new:,.0f}")
    new_console().print(table)
    return 0


def rate(work: Callable[[], object]) -> float:
    """Calls per second of CPU time, in the best of several rounds."""
    timer = timeit.Timer(work, timer=time.process_time)
    calls = max(1, round(ROUND_S / timer.timeit(1)))
    return calls / min(timer.repeat(ROUNDS, calls))


if __name__ == "__main__":
    sys.exit(main())
