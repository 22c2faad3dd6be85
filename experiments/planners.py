"""Compare the planners on seeded instances, as judged by the simulator. No ranks, no measurement.

    python experiments/planners.py instances [--count 200] [--workers 2]   # joint against two steps, heuristics and chance
    python experiments/planners.py gaps [--units 24 48 96]  # distance to the proven bound

For `instances`, the solvers start without heuristics, so that they can be compared with the heuristics. For `gaps`,
they start as they do for users.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from rich.console import Console
from rich.table import Table

from experiments.config.checks import positive
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.memory_aware import MemoryAware
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.judge import InfeasibleBudget
from mdcs.planner.make import floor_bytes, make_plan
from mdcs.planner.named import SCHEDULERS, JointPlanner, Scheduler, StrategyPlanner
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.random_mix import RandomMix
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contents import Optimizer, Profile, Slot, Unit
from mdcs.profile.link import Link

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


# ---- joint against the others


@dataclass(frozen=True)
class Result:
    """Step times in seconds, by replay. ``bound`` is the bound that the joint solve has proven."""

    seed: int
    bound: float
    joint: float
    two_steps: float  # ilp and memory_aware at the best share
    greedy: float  # with the best scheduler and share
    heuristic: float  # the best of all simple planners
    chance: float  # median of 20 random feasible plans


def instance(seed: int) -> tuple[Profile, int]:
    """A random chain and a budget above its floor."""
    rng = random.Random(10_000 + seed)
    profile = chain(
        rng.randint(4, 8), seed, ratio=rng.choice([0.5, 1.0, 1.5, 2.0, 3.0]), world=rng.choice([2, 4, 8]),
        interference=rng.choice([0.0, 0.0, 0.2]), depth=rng.choice([2, 4]),
    )  # fmt: skip
    return profile, int(floor_bytes(profile) * (1 + rng.choice([0.05, 0.1, 0.2, 0.3, 0.5])))


def judge_planners(seed: int, seconds: float = 20.0) -> Result:
    profile, budget = instance(seed)
    best = make_plan(profile, Joint(seconds=seconds, heuristics=False), budget=budget)
    assert best.prediction is not None and best.bound_s is not None
    greedy = fastest(profile, budget, [Greedy()], heuristic_schedulers(), (None, *SHARES))
    return Result(
        seed,
        bound=best.bound_s,
        joint=best.prediction.step_s,
        two_steps=fastest(profile, budget, [Ilp()], [MemoryAware(seconds=seconds, heuristics=False)], SHARES),
        greedy=greedy,
        heuristic=min(greedy, best_of_the_others(profile, budget)),
        chance=statistics.median(random_steps(profile, budget, 20)),
    )


def best_of_the_others(profile: Profile, budget: int) -> float:
    """The shortest step of uniform strategies and of the strategy ILP, under the simple schedulers."""
    return fastest(profile, budget, [*(Uniform(str(k)) for k in Strategy), Ilp()], heuristic_schedulers(), (None,))


def heuristic_schedulers() -> list[Scheduler]:
    return [SCHEDULERS[name]() for name in HEURISTIC_SCHEDULERS]


def fastest(
    profile: Profile,
    budget: int,
    strategies: Iterable[StrategyPlanner],
    schedulers: list[Scheduler],
    shares: Iterable[float | None],
) -> float:
    """The shortest step of all combinations that fit; infinite if none fits."""
    steps = [math.inf]
    for strategy in strategies:
        for share in shares:
            steps += [s for s in (step(profile, budget, strategy, scheduler, share) for scheduler in schedulers) if s]
    return min(steps)


def random_steps(profile: Profile, budget: int, count: int) -> Iterator[float]:
    """Yield the steps of random feasible plans: random strategies in a random order."""
    seed = 0
    while count:
        found = step(profile, budget, RandomMix(seed), SCHEDULERS["random"](seed=seed), None)  # type: ignore[call-arg]
        seed += 1
        if found:
            count -= 1
            yield found


def step(
    profile: Profile, budget: int, strategy: StrategyPlanner | JointPlanner, scheduler: Scheduler, share: float | None
) -> float | None:
    try:
        plan = make_plan(profile, strategy, scheduler, budget=budget, schedule_share=share)
    except (InfeasibleBudget, PlanError):
        return None
    assert plan.prediction is not None
    return plan.prediction.step_s


def show_comparison(results: list[Result], console: Console) -> None:
    table = Table(title=f"{len(results)} instances: step time by replay, the solvers' own plans alone")
    for heading in ("", "faster by ≥ 0.1 %", "equal within 0.1 %", "slower", "geometric mean of the ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    rows = [
        ("joint against ilp + memory_aware", [r.two_steps / r.joint for r in results]),
        ("ilp + memory_aware against greedy + best scheduler", [r.greedy / r.two_steps for r in results]),
        ("greedy + best scheduler against the median of 20 random", [r.chance / r.greedy for r in results]),
        ("joint against the best heuristic", [r.heuristic / r.joint for r in results]),
        ("joint against its proven bound", [r.bound / r.joint for r in results]),
    ]
    for name, ratios in rows:
        faster, slower = sum(x >= 1.001 for x in ratios), sum(x <= 0.999 for x in ratios)
        table.add_row(
            name, str(faster), str(len(ratios) - faster - slower), str(slower), f"{statistics.geometric_mean(ratios):.3f}"
        )
    console.print(table)
    hard = [r for r in results if r.heuristic > r.bound / 0.97]
    for name, times in (("ilp + memory_aware", [r.two_steps for r in hard]), ("the best heuristic", [r.heuristic for r in hard])):
        won = sum(other >= 1.01 * r.joint for r, other in zip(hard, times, strict=True))
        console.print(
            f"of {len(hard)} instances whose best heuristic is ≥ 3 % off the bound, joint beats {name} by ≥ 1 % on {won}"
        )


# ---- distance to the bound


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
        greedy = fastest(profile, budget, [Greedy()], heuristic_schedulers(), (None, *SHARES))
        heuristic = min(greedy, best_of_the_others(profile, budget))
        assert plan.prediction is not None
        joint, bound = plan.prediction.step_s, plan.bound_s or 0.0
        table.add_row(
            str(count), str(seed), f"{LIMITS_S[count]:g}", f"{took:.0f}", f"{heuristic * 1e3:.1f}",
            f"{1 - bound / heuristic:.1%}", f"{joint * 1e3:.1f}", f"{1 - bound / joint:.2%}", plan.outcome,
        )  # fmt: skip
        console.print(f"{count} units, seed {seed}: gap {1 - bound / joint:.2%} after {took:.0f} s", highlight=False)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python experiments/planners.py", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    many = commands.add_parser("instances", help="joint against two steps, heuristics and chance")
    many.add_argument("--count", type=positive, default=200)
    many.add_argument("--workers", type=positive, default=2)
    few = commands.add_parser("gaps", help="distance to the proven bound on the committed instances")
    few.add_argument("--units", type=int, nargs="+", default=list(LIMITS_S), choices=list(LIMITS_S))
    arguments = parser.parse_args()
    console = Console(width=150)
    if arguments.command == "gaps":
        gaps(arguments.units, console)
        return 0
    results = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for result in pool.map(judge_planners, range(arguments.count)):
            results.append(result)
            if len(results) % 20 == 0:
                console.print(f"{len(results)} of {arguments.count}", highlight=False)
    show_comparison(results, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
