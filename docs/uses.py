"""Make docs/uses.png: what a budget is spent on, as it grows: activations, strategies, schedule; and the step's time.

    python docs/uses.py

Plans are made and replayed here, for the calculated model of docs/period.py, on slower links.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

if __name__ == "__main__":  # from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import matplotlib.pyplot as plt

import mdcs
from docs.period import CLUSTER, profile_on
from mdcs.planner.feasibility import PlanningProblem, min_peak_strategies
from mdcs.planner.pipeline import unsharded_bytes
from mdcs.planner.priority import Priority
from mdcs.planner.strategies import Greedy
from mdcs.sizes import GIB

TO = Path(__file__).with_name("uses.png")
SLOW = dataclasses.replace(CLUSTER, card_rate=10e9)  # per GPU, so that sharding costs more than computing hides
POINTS = 12
LOOKS = {  # from the ground up; hatches tell them apart without colours
    "least of any plan": ("#b8bfc9", ""),
    "activations": ("#d98a3d", "///"),
    "strategies": ("#4f7fb5", "..."),
    "schedule": ("#5fa777", "xxx"),
}


def uses_of(plan: mdcs.Plan, floor: int) -> tuple[int, int, int, int]:
    """Bytes of the plan's peak: the floor, then what activations, strategies and the schedule add, in this order."""
    problem = PlanningProblem(plan.job, None)
    leanest, mix = problem.peak(min_peak_strategies(plan.job)), problem.peak(plan.strategies)
    assert plan.prediction is not None
    return floor, leanest - floor, mix - leanest, max(0, plan.prediction.peak_bytes - mix)


def main() -> None:
    """Plan for budgets from the floor to what DDP needs, and draw."""
    job = mdcs.Job(profile_on(SLOW))
    fastest = mdcs.make_plan(job, Greedy(), Priority(), budget=unsharded_bytes(job)).prediction
    assert fastest is not None
    floor, most = mdcs.floor_bytes(job, "planned"), int(1.05 * fastest.peak_bytes)
    budgets = [floor + (most - floor) * i // (POINTS - 1) for i in range(POINTS)]
    plans = [mdcs.make_plan(job, Greedy(), Priority(), budget=budget, recompute="planned") for budget in budgets]
    x = [budget / GIB for budget in budgets]
    figure, (memory, time) = plt.subplots(
        2, 1, figsize=(7.5, 5.6), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    stacks = zip(*(uses_of(plan, floor) for plan in plans), strict=True)
    areas = memory.stackplot(x, [[size / GIB for size in stack] for stack in stacks], labels=LOOKS)
    for area, (colour, hatch) in zip(areas, LOOKS.values(), strict=True):
        area.set(facecolor=colour, edgecolor="white", linewidth=0, hatch=hatch)
    line = memory.plot(x, x, color="black", linewidth=0.8, linestyle="dashed", label="budget")
    memory.set(ylabel="GiB per rank, at the peak", ylim=(0, None))
    memory.legend(handles=[*line, *reversed(areas)], loc="upper left", frameon=False)  # in the order of the stack
    time.plot(x, [plan.prediction.step_s * 1e3 for plan in plans if plan.prediction], color="black")
    time.set(xlabel="budget, GiB per rank", ylabel="step, ms", ylim=(0, None))
    figure.savefig(TO, dpi=110)
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.prediction is not None
        again = sum(choice != "none" for choice in plan.recompute)
        print(f"{budget / GIB:6.2f} GiB: {plan.prediction.step_s * 1e3:7.1f} ms, {again} units recompute")


if __name__ == "__main__":
    main()
