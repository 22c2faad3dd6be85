"""Three lower bounds of the step time of any plan for a job and a budget.

* traffic: the fewest bytes that strategies within the budget can send, at the link's bandwidth, all beside compute;
* structural: the same with the windows in which operations can be sent; the first unit has none, but for gradients that come
  before its slot ends;
* solver: what a planner's solver has proven of the whole slot model, if one was asked.

The first two are linear relaxations of the loose slot model (:mod:`mdcs.planner.ilp.slot_model`): the schedule itself needs
no memory, and units may mix strategies. What an ideal DDP would take (:func:`ideal_ddp_s`) says how much an ideal schedule,
at the structural bound, could win over it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mdcs.plan.job import Job
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.solver import solve
from mdcs.planner.judge import Judge
from mdcs.planner.schedulers.wfbp import as_ready
from mdcs.profile.contents import Contention, Profile
from mdcs.simulator.simulate import replay

_BUCKETS = 8
_SLOTS = 96  # beyond, neighbouring slots are put into bins


@dataclass(frozen=True)
class Bounds:
    """Seconds per step; ``solver_s`` is None when no solver has proven anything."""

    traffic_s: float
    structural_s: float
    solver_s: float | None


def bounds_of(plan: Plan, seconds: float = 60.0) -> Bounds:
    """Bounds for the job and the budget of a plan, whatever its strategies; ``seconds`` limits each of two solves.

    What could not be proven in time is replaced by the weaker bound; the weakest is compute alone.
    """
    judge = Judge(plan.job, plan.budget)
    slots = plan.period.length
    model = SlotModel(judge, loose=True, width=1 if slots <= _SLOTS else -(-2 * slots // _SLOTS))
    busy = solve(model.traffic(), seconds=seconds, relax=True).bound or 0.0
    traffic = max(model.compute_s + (1 - 1 / model.slow) * busy, busy)
    exposed = solve(model.problem, seconds=seconds, relax=True).bound or 0.0
    return Bounds(traffic, max(traffic, model.step_bound(exposed)), plan.bound_s)


def ideal_ddp_s(profile: Profile, micro_steps: int = 1) -> float:
    """Seconds per step of DDP where messages cost compute nothing and the link only their bytes: everything is replicated, each
    unit is all-reduced beside backward as its gradients come, in eighths of the largest, and all is updated before the next
    forward.
    """
    none = (0.0,) * len(profile.link.kinds)
    link = dataclasses.replace(profile.link, alpha=none, gap=none)
    free = dataclasses.replace(profile, link=link, contention=Contention(), interference=0.0, copy_seconds_per_byte=0.0)
    judge = Judge(Job(free, micro_steps, cross_iteration=False), None)
    mix = judge.mix([Strategy.dp] * len(free.units))
    blocks = mix.cut(max(1, max(layout.grad_bytes for layout in free.layouts) // _BUCKETS))
    return replay(as_ready(mix, "ddp", blocks)).period_s
