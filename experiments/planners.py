"""Compare joint with heuristics and with its proven bound on seeded instances, as judged by the simulator.

    mdcs planners [--units 24 48 96]

No ranks, no measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import floor_bytes, make_plan
from mdcs.planner.registry import SCHEDULERS, StrategyPlanner
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HEURISTIC_SCHEDULERS = ("sequential", "wfbp", "fusion", "mg_wfbp", "partitioning", "priority", "dear")
LIMITS_S = {24: 20.0, 48: 60.0, 96: 120.0}
COMMITTED = ((24, 0), (24, 1), (24, 2), (48, 0), (48, 1), (48, 2), (96, 0), (96, 1), (96, 2))
"""(units, seed) of the instances of the table of gaps.

The budget is 30 % above the floor. Gathering the whole model takes 1.5 × as long as the forward pass.
"""


def chain(units: int, seed: int, *, ratio: float, world: int = 4, interference: float = 0.0, depth: int = 2) -> Profile:
    """A chain of uneven layers. ``ratio`` is the time of one all-gather of the model over the time of the forward pass.
    """
    rng = random.Random(seed)
    sizes = [rng.choice([1, 1, 2, 4]) * rng.randint(200_000, 400_000) for _ in range(units)]
    forward = [rng.uniform(2e-3, 6e-3) for _ in range(units)]
    activations = [int(rng.uniform(0.2, 1.5) * 1e6) for _ in range(units)]
    slots, live = [], 0
    for u in range(units):
        slots.append(Slot(u, "F", forward[u], live, live + 2 * activations[u]))
        live += activations[u]
    for u in reversed(range(units)):
        slots.append(Slot(u, "B", 2 * forward[u], live, live + 2 * activations[u]))
        live -= activations[u]
    beta = ratio * sum(forward) / (sum(sizes) * 4 * (world - 1) / world)
    return Profile(
        tuple(Unit(f"layer{u}", (n,), True, (u, u), (units - 1 - u,) * 2) for u, n in enumerate(sizes)),
        tuple(slots),
        world,
        Link((2e-5,) * 4, (beta,) * 4, depth, block=1 << 18),
        Optimizer("adam", state_tensors=2, state_fixed=4, scratch_tensors=2),
        interference=interference,
    )


def fastest(
    profile: Profile,
    budget: int,
    strategies: Iterable[StrategyPlanner],
    shares: Iterable[float | None],
) -> float:
    """The shortest step of the strategies with all heuristic schedulers; infinite if none fits."""
    steps = [math.inf]
    for strategy, share, name in itertools.product(strategies, shares, HEURISTIC_SCHEDULERS):
        with contextlib.suppress(InfeasibleBudget, PlanError):
            plan = make_plan(profile, strategy, SCHEDULERS[name](), budget=budget, schedule_share=share)
            assert plan.prediction is not None
            steps.append(plan.prediction.step_s)
    return min(steps)


def gaps(units: list[int], console: Console) -> None:
    table = Table(title="gap = (replayed step - proven bound of the unmerged problem) / replayed step")
    headings = ("units", "seed", "limit s", "took s", "best heuristic ms", "off bound", "joint ms", "gap", "outcome")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "outcome" else "right")
    for count, seed in COMMITTED:
        if count not in units:
            continue
        profile = chain(count, seed, ratio=1.5)
        budget = int(1.3 * floor_bytes(profile))
        began = time.monotonic()
        plan = make_plan(profile, Joint(LIMITS_S[count]), budget=budget)
        took = time.monotonic() - began
        others: list[StrategyPlanner] = [*(Uniform(str(k)) for k in Strategy), Ilp()]
        heuristic = min(fastest(profile, budget, [Greedy()], (None, *SHARES)), fastest(profile, budget, others, [None]))
        assert plan.prediction is not None
        joint, bound = plan.prediction.step_s, plan.bound_s or 0.0
        table.add_row(
            str(count), str(seed), f"{LIMITS_S[count]:g}", f"{took:.0f}", f"{heuristic * 1e3:.1f}",
            f"{1 - bound / heuristic:.1%}", f"{joint * 1e3:.1f}", f"{1 - bound / joint:.2%}", plan.outcome,
        )  # fmt: skip
        console.print(f"{count} units, seed {seed}: gap {1 - bound / joint:.2%} after {took:.0f} s", highlight=False)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs planners", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=list(LIMITS_S), choices=list(LIMITS_S))
    gaps(parser.parse_args().units, Console(width=150))
    return 0


if __name__ == "__main__":
    sys.exit(main())
