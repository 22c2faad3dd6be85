"""Compare joint with heuristics and with its proven bound on seeded instances, as judged by the simulator.

    python -m benchmarks.planners [--units 24 48 96 192] [--recompute] [--seconds 30]
    python -m benchmarks.planners --replays     # how many plans the simulator replays in a second of one core

The budget is 30 % above the floor. Gathering the whole model takes 1.5 × as long as the forward pass. With --recompute
layers may recompute their activations, and the plan decides which do. No ranks, no measurement. "cpu s" are the
processor seconds of planner and solvers: on a busy machine the limit is over before they have had theirs.

With --replays units are zero2, sdp and fsdp in turn, the scheduler is wfbp. "Again" replays a plan whose ledger and
course exist already. "New" makes, checks and prepares a new plan every time, as a local search does. Rates are of CPU
time, the best of several rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import os
import random
import time
import timeit
from collections.abc import Callable, Iterable

from analysis.table import new_console, new_table
from mdcs.plan.job import Job
from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.plan.plan import PlanError
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import SCHEDULERS, StrategyPlanner, floor_bytes, make_plan
from mdcs.planner.recompute import Planned
from mdcs.planner.schedulers import StrategyAssignment, Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.link import Link
from mdcs.profile.recompute import FULL, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit
from mdcs.simulator.simulate import replay

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
HEURISTIC_SCHEDULERS = ("sequential", "wfbp", "fusion", "mg_wfbp", "partitioning", "priority", "dear")
LIMITS_S = {24: 20.0, 48: 30.0, 96: 30.0, 192: 30.0}
RECOMPUTE_LIMITS_S = {24: 27.0, 48: 45.0, 96: 120.0, 192: 120.0}
SEEDS = (0, 1)


def chain(units: int, seed: int, *, ratio: float) -> Profile:
    """A chain of uneven layers. ``ratio``: seconds of one all-gather of the model over those of the forward pass."""
    rng, world = random.Random(seed), 4
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
        tuple(slots), world, Link((2e-5,) * 4, (beta,) * 4, depth=2, block=1 << 18),
        Optimizer("adam", state_tensors=2, state_fixed=4, scratch_tensors=2),
    )  # fmt: skip


def recomputable(profile: Profile) -> Profile:
    """The chain with six times the activations, about 40 % of the peak of dp, and two options per layer. ``full`` frees
    90 % for the seconds of the forward, ``selective`` 50 % for 15 % of them.
    """
    count, live, slots, options = len(profile.units), 0, list[Slot](), list[RecomputeOption]()
    for s, slot in enumerate(profile.slots):
        own = 6 * (slot.peak - slot.live) // 2
        slots.append(dataclasses.replace(slot, live=live, peak=live + 2 * own))
        live += own if slot.phase == "F" else -own
        if slot.phase == "B":
            forward_s = profile.slots[slot.unit].seconds
            for choice, freed, part in ((FULL, own * 9 // 10, 1.0), (SELECTIVE, own // 2, 0.15)):
                use = RecomputeUse(slot.unit, s - count, freed, part * forward_s, 2 * own + freed)
                options.append(RecomputeOption(slot.unit, choice, (use,)))
    return dataclasses.replace(profile, slots=tuple(slots), recompute=tuple(options))


def fastest(
    profile: Profile, budget: int, strategies: Iterable[StrategyPlanner], shares: Iterable[float | None],
    schedulers: Iterable[str] = HEURISTIC_SCHEDULERS, recompute: str | None = None,
) -> float:  # fmt: skip
    """The shortest step of the strategies with these schedulers; infinite if none fits."""
    steps = [math.inf]
    asked = itertools.product(strategies, shares, (SCHEDULERS[name]() for name in schedulers))
    for strategy, share, by in asked:
        with contextlib.suppress(InfeasibleBudget, PlanError):
            plan = make_plan(profile, strategy, by, budget=budget, schedule_share=share, recompute=recompute)
            assert plan.prediction is not None
            steps.append(plan.prediction.step_s)
    return min(steps)


def gaps(units: list[int], recompute: bool, seconds: float | None) -> None:
    """Plan the instances and print the table."""
    console, title = new_console(150), "gap = (replayed step - proven bound of the unmerged problem) / replayed step"
    headings = ("units", "seed", "limit s", "took s", "cpu s", "best heuristic ms", "off bound", "joint ms", "gap",
                "outcome")  # fmt: skip
    table = new_table(title, headings, left=("outcome",))
    for count, seed in itertools.product(units, SEEDS):
        profile, rule, limit_s = chain(count, seed, ratio=1.5), None, LIMITS_S[count]
        if recompute:
            profile, rule, limit_s = recomputable(profile), Planned.name, RECOMPUTE_LIMITS_S[count]
        budget, limit_s = int(1.3 * floor_bytes(profile, rule)), seconds or limit_s
        began, cpu = time.monotonic(), sum(os.times()[:4])
        plan = make_plan(profile, Joint(limit_s), budget=budget, recompute=rule)
        took, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu
        if recompute:
            heuristic = fastest(profile, budget, [Greedy()], [None], ["wfbp", "priority"], rule)
        else:
            alike = [Uniform(str(k)) for k in Strategy]
            heuristic = min(
                fastest(profile, budget, [Greedy()], (None, *SHARES)), fastest(profile, budget, alike, [None]),
                fastest(profile, budget, [Ilp()], [None], ["priority"]),
            )  # fmt: skip
        assert plan.prediction is not None
        joint, bound = plan.prediction.step_s, plan.bound_s or 0.0
        table.add_row(
            str(count), str(seed), f"{limit_s:g}", f"{took:.0f}", f"{cpu:.0f}", f"{heuristic * 1e3:.1f}",
            f"{1 - bound / heuristic:.1%}", f"{joint * 1e3:.1f}", f"{1 - bound / joint:.2%}", plan.outcome,
        )  # fmt: skip
        console.print(f"{count} units, seed {seed}: gap {1 - bound / joint:.2%} after {took:.0f} s", highlight=False)
    console.print(table)


def replays() -> None:
    """Measure replays of a plan, with one message per unit and kind, and print the table."""
    mix = (Strategy.zero2, Strategy.sdp, Strategy.fsdp) * 16
    plan = Wfbp().schedule(StrategyAssignment(Job(chain(len(mix), 0, ratio=1.0)), mix))
    title = f"{len(mix)} units, {len(plan.messages)} messages: replays per second"
    table = new_table(title, ("what is asked for", "again", "new"), left=("what is asked for",))
    bounded = dataclasses.replace(plan, budget=min_feasible_budget(plan))
    for what, of in (("period", plan), ("period, with a tight budget", bounded)):
        again = rate(lambda plan=of: replay(plan).period_s)  # type: ignore[misc]
        new = rate(lambda plan=of: replay(dataclasses.replace(plan)).period_s)  # type: ignore[misc]
        table.add_row(what, f"{again:,.0f}", f"{new:,.0f}")
    new_console().print(table)


def rate(work: Callable[[], object]) -> float:
    """Calls per second of CPU time, in the best of several rounds."""
    timer = timeit.Timer(work, timer=time.process_time)
    calls = max(1, round(0.02 / timer.timeit(1)))
    return calls / min(timer.repeat(15, calls))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=list(LIMITS_S), choices=list(LIMITS_S))
    parser.add_argument("--recompute", action="store_true", help="let plans decide what is recomputed")
    parser.add_argument("--seconds", type=float, help="limit of joint; none: by the number of units")
    parser.add_argument("--replays", action="store_true", help="measure replays instead, of 48 units")
    asked = parser.parse_args()
    if asked.replays:
        replays()
    else:
        gaps(asked.units, asked.recompute, asked.seconds)


if __name__ == "__main__":
    main()
