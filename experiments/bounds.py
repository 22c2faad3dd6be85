"""Three lower bounds of the step time of any plan for a job and a budget.

* traffic: the fewest bytes that strategies within the budget can send, at the link's bandwidth, all overlapped with
  compute.
* structural: the same with the windows of operations. The first unit has no window, except for gradients that are ready
  before its slot ends.
* solver: the bound that a planner's solver has proven for the whole slot model.

The first two are linear relaxations of the loose slot model (:mod:`mdcs.planner.ilp.slot_model`): the schedule needs no
memory, and units may mix strategies. The step of an ideal DDP (:func:`ideal_ddp_s`) shows how much an ideal schedule at
the structural bound could gain over DDP.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.solver import solve
from mdcs.planner.schedulers import as_ready
from mdcs.profile.link import Contention
from mdcs.profile.schema import Profile
from mdcs.simulator.simulate import replay

_BUCKETS = 8
_SLOTS = 96  # with more slots, neighbouring slots are put into bins


@dataclass(frozen=True)
class Bounds:
    """Lower bounds in seconds per step. ``solver_s`` is None when no solver has proven a bound."""

    traffic_s: float
    structural_s: float
    solver_s: float | None


def bounds_of(plan: Plan, seconds: float = 60.0) -> Bounds:
    """Return the bounds for the job and the budget of a plan, for any strategies.

    ``seconds`` limits each of two solves. If a solve does not finish, the weaker bound takes its place. The weakest is
    compute alone.
    """
    problem = PlanningProblem(plan.job, plan.budget)
    slots = plan.period.length
    model = SlotModel(problem, loose=True, width=1 if slots <= _SLOTS else -(-2 * slots // _SLOTS))
    busy = solve(model.traffic(), seconds=seconds, relax=True).bound or 0.0
    traffic = max(model.compute_s + (1 - 1 / model.slowdown) * busy, busy)
    exposed = solve(model.program, seconds=seconds, relax=True).bound or 0.0
    return Bounds(traffic, max(traffic, model.step_bound(exposed)), plan.bound_s)


def ideal_ddp_s(profile: Profile, micro_steps: int = 1) -> float:
    """Return the seconds per step of an ideal DDP.

    All units are replicated. Messages cost no compute time, and the link only the time of their bytes. Each unit is
    all-reduced during backward as its gradients become ready, in blocks of an eighth of the largest unit. All updates
    end before the next forward.
    """
    none = (0.0,) * len(profile.link.kinds)
    link = dataclasses.replace(profile.link, alpha=none, gap=none)
    free = dataclasses.replace(profile, link=link, contention=Contention(), interference=0.0, copy_seconds_per_byte=0.0)
    problem = PlanningProblem(Job(free, micro_steps, cross_iteration=False), None)
    mix = problem.mix([Strategy.dp] * len(free.units))
    blocks = mix.partition(max(1, max(layout.grad_bytes for layout in free.layouts) // _BUCKETS))
    return replay(as_ready(mix, "ddp", blocks)).period_s
