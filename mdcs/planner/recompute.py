"""Which units recompute: alike for all, drawn, or decided with the plan, by a :func:`ladder` from none to the floor."""

from __future__ import annotations

import bisect
import dataclasses
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol

from mdcs.options import Checked, option
from mdcs.plan.job import Job, chosen_options
from mdcs.plan.ledger import check
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.feasibility import PlanningProblem, min_peak_job, min_peak_strategies, recompute_steps
from mdcs.profile.recompute import CHOICES, FULL, NONE, REASONS, SELECTIVE, uniform
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB

_ROUNDS = 3  # over all units, of changes to a plan


class RecomputeRule(Protocol):
    """Says which units recompute."""

    @property
    def name(self) -> str:
        """Name in tables."""

    def choices(self, profile: Profile) -> tuple[str, ...] | None:
        """Return a choice per unit (:data:`mdcs.profile.recompute.CHOICES`). None: the plan decides."""


@dataclass(frozen=True)
class Uniform(Checked):
    """All units that can have the choice ``each``. The others keep their activations."""

    each: str = option(
        NONE, "none keeps all activations, full the inputs, selective also outputs of matrix products", choices=CHOICES
    )

    @property
    def name(self) -> str:
        """Name of the rule."""
        return {NONE: "none", FULL: "all", SELECTIVE: "selective"}[self.each]

    def choices(self, profile: Profile) -> tuple[str, ...]:
        """Return the choice for every unit that has an option for it. Raises ValueError if none has."""
        if self.each != NONE and not any(o.choice == self.each for o in profile.recompute):
            raise ValueError(f"recompute {self.name}: the profile has no unit that can recompute its activations so")
        return uniform(profile.recompute, len(profile.units), self.each)


@dataclass(frozen=True)
class Random(Checked):
    """Draws a choice per unit. The same ``seed`` gives the same choices. They may exceed a budget."""

    name: ClassVar[str] = "random"
    seed: int = option(0, "seed of the draw", at_least=0)

    def choices(self, profile: Profile) -> tuple[str, ...]:
        """Return one of each unit's choices."""
        rng, having = random.Random(self.seed), {(o.unit, o.choice) for o in profile.recompute}
        known = ([c for c in CHOICES if c == NONE or (u, c) in having] for u in range(len(profile.units)))
        return tuple(map(rng.choice, known))


@dataclass(frozen=True)
class Planned(Checked):
    """Decided with the plan, under its budget: what is recomputed buys what is faster."""

    name: ClassVar[str] = "planned"

    def choices(self, profile: Profile) -> None:
        """Return None: the plan decides."""


@dataclass(frozen=True)
class Auto(Checked):
    """Decided with the plan where no plan keeps the budget without recomputation; else nothing is recomputed."""

    name: ClassVar[str] = "auto"

    def choices(self, profile: Profile) -> tuple[str, ...]:
        """Return no recomputation, which :func:`mdcs.planner.pipeline.make_plan` tries first."""
        return KEEP.choices(profile)


KEEP, AUTO = Uniform(), Auto()
"""The rules of no recomputation, and of recomputation where no plan keeps the budget without."""

RECOMPUTE: dict[str, Callable[[], RecomputeRule]] = {
    "none": Uniform, "all": lambda: Uniform(FULL), "selective": lambda: Uniform(SELECTIVE), "random": Random,
    "planned": Planned, "auto": Auto,
}  # fmt: skip


def recompute_named(name: str) -> RecomputeRule:
    """Return the rule of this name. Raises ValueError, which lists the names, for an unknown name."""
    if name not in RECOMPUTE:
        raise ValueError(f"unknown recompute {name!r}: {', '.join(RECOMPUTE)}")
    return RECOMPUTE[name]()


def is_measured(profile: Profile) -> bool:
    """Return whether the profile says what recomputation frees and costs, or that it frees nothing."""
    return bool(profile.recompute) or REASONS in profile.about


def in_words(plan: Plan) -> str:
    """Return one line: the units of the plan that recompute, and what that frees and costs; "" for none."""
    options = chosen_options(plan.job.profile, plan.recompute)
    if not options:
        return ""
    freed, seconds = sum(o.freed for o in options), plan.micro_steps * sum(o.seconds for o in options)
    return (
        f"{len(options)} of {len(plan.profile.units)} units recompute their activations: {freed / MIB:.1f} MiB fewer, "
        f"{seconds * 1e3:.1f} ms more per step"
    )


def fastest(job: Job, estimate_s: Callable[[Job], float], step_s: Callable[[Job], float]) -> Job:
    """Return the step of :func:`ladder` with the smallest ``step_s`` found, or the last if all are infinite. Of those
    that fit, the first is tried, ever fewer beyond, and those halfway between the fastest and its neighbours, where
    ``estimate_s`` (quick, mostly not above, infinite for what does not fit) is below what is known.
    """
    steps = ladder(job)
    estimate = cache(lambda k: estimate_s(steps[k]))
    first = bisect.bisect_left(range(len(steps)), True, key=lambda k: estimate(k) < math.inf)
    if first == len(steps):
        return steps[-1]
    found: dict[int, float] = {}
    ask = [first, *(k for i in range(len(steps).bit_length()) if (k := first + 2**i) < len(steps))]
    while ask:
        for k in ask:
            promising = estimate(k) < min(found.values(), default=math.inf)
            found[k] = step_s(steps[k]) if promising else math.inf
        best, known = min(found, key=lambda k: (found[k], -k)), sorted(found)
        at = known.index(best)
        ask = [k for k in {(best + other) // 2 for other in known[max(0, at - 1) : at + 2]} if k not in found]
    return steps[best]


def least_within(job: Job, limit: int) -> Job:
    """Return the first step of :func:`ladder`, or the last, whose leanest strategies fit ``limit`` bytes."""
    steps = ladder(job)
    return steps[bisect.bisect_left(steps[:-1], True, key=lambda each: PlanningProblem(each, None).floor <= limit)]


def refined(plan: Plan) -> Plan:
    """Return the plan with other choices of single units, as long as its replay gets faster, within its budget."""
    profile, best_s = plan.job.profile, replay(plan).period_s
    known = [(NONE, *(o.choice for o in profile.recompute if o.unit == u)) for u in range(len(profile.units))]
    for _ in range(_ROUNDS):
        before = best_s
        for u, c in [(u, c) for u, choices in enumerate(known) for c in choices]:
            now = plan.recompute or (NONE,) * len(known)
            if c == now[u]:
                continue
            try:
                other = dataclasses.replace(plan, job=plan.job.with_recompute((*now[:u], c, *now[u + 1 :])))
                check(other)
            except PlanError:
                continue
            if (seconds := replay(other).period_s) < best_s * (1 - 1e-9):
                plan, best_s = other, seconds
        if best_s == before:
            break
    return plan


def ladder(job: Job) -> list[Job]:
    """Return the job with more and more recomputation, from none to the floor: each step needs less, as estimated."""
    leanest = min_peak_job(job)
    if not leanest.recompute:
        return [dataclasses.replace(job, recompute=())]
    steps = recompute_steps(job, min_peak_strategies(leanest))
    return steps if steps[-1] == leanest else [*steps, leanest]
