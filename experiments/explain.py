"""Explanation of a plan: what another strategy of each unit would change, effect of the schedule, contents of the
memory.

Each unit is compared with the same plan in which only this unit has another strategy: fsdp, which holds least; for an
fsdp unit sdp, and for a unit to which fsdp gives nothing zero2. The other units' messages stay where they are, and so
do the unit's own as far as both strategies send them. The changed plan is replayed, so what is said of it is true of a
plan that can run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from mdcs.plan.ledger import min_feasible_budget
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_model import SlotModel
from mdcs.planner.ilp.solver import solve
from mdcs.planner.schedulers import StrategyAssignment, sequential
from mdcs.profile.link import Kind
from mdcs.profile.recompute import NONE
from mdcs.simulator.simulate import replay

_AHEAD = (1, 2, 4, 8)
"""Slots between a gather that is new in a changed plan and the slot that needs it: the fastest of these counts."""


@dataclass(frozen=True)
class UnitChoice:
    """The strategy of one unit, and what another one, if there is one, would change in the plan."""

    unit: str
    bytes: int  # of its parameters
    strategy: str
    recompute: str  # none, full or selective
    messages: dict[str, int]  # number by kind; a fused one counts for each of its units
    instead: str | None = None  # the other strategy
    needs_bytes: int | None = None  # by which the smallest budget of the changed plan is larger (below 0: smaller)
    step_s: float | None = None  # that the step then takes more; None: the changed plan does not fit the budget

    @property
    def is_better(self) -> bool:
        """Whether the changed plan is faster, by more than rounding, and keeps the budget."""
        return self.step_s is not None and self.step_s < -1e-6


@dataclass(frozen=True)
class ScheduleChoice:
    """Increase of the peak (bytes) and of the step (seconds) over the sequential schedule of the same mix."""

    peak_bytes: int
    step_s: float


@dataclass(frozen=True)
class BindingSlot:
    """The slot with the highest peak (bytes per rank). ``memory``: peak of each category within the slot."""

    slot: str
    bytes: int
    memory: dict[str, int]


def choices(plan: Plan) -> list[UnitChoice]:
    """Return what another strategy would change, unit by unit."""
    mix, own_s, needed = StrategyAssignment(plan.job, plan.strategies), replay(plan).period_s, min_feasible_budget(plan)
    kinds = [Counter[str]() for _ in plan.strategies]
    for message in plan.messages:
        for u in {u for u, _ in message.parts}:
            kinds[u][str(message.kind)] += 1
    out = []
    for u, (unit, strategy) in enumerate(zip(plan.profile.units, plan.strategies, strict=True)):
        about = UnitChoice(
            unit.name, unit.numel * plan.profile.layouts[u].param_width, str(strategy),
            plan.recompute[u] if plan.recompute else NONE, dict(kinds[u]),
        )  # fmt: skip
        found = None if (other := _other(mix, u)) is None else _fastest(plan, other, u)
        if other is not None and found is not None:
            needs, changed = found
            step_s, instead = None if changed is None else replay(changed).period_s - own_s, str(other.strategies[u])
            about = dataclasses.replace(about, instead=instead, needs_bytes=needs - needed, step_s=step_s)
        out.append(about)
    return out


def _other(mix: StrategyAssignment, unit: int) -> StrategyAssignment | None:
    """Return the mix to compare with, in which only this unit differs."""
    own = mix.strategies[unit]
    for strategy in (Strategy.fsdp, Strategy.sdp, Strategy.zero2):
        strategies = (*mix.strategies[:unit], strategy, *mix.strategies[unit + 1 :])
        other = dataclasses.replace(mix, chosen=strategies)
        if other.strategies[unit] is not own:  # Mix turns fsdp into sdp where fsdp gains nothing
            return other
    return None


def _fastest(plan: Plan, mix: StrategyAssignment, unit: int) -> tuple[int, Plan | None] | None:
    """Return the smallest budget of the fastest changed plan that fits what the plan may take, and that plan. Of plans
    that are equally fast (within 1 ns) it is the one that needs least. Where none fits: the smallest budget of all, and
    None. Where there is no changed plan: None."""
    made = [(min_feasible_budget(each), each) for each in _changed(plan, mix, unit)]
    within = [(needs, dataclasses.replace(each, budget=plan.budget, limit=plan.limit)) for needs, each in made
              if plan.admissible is None or needs - plan.reserve <= plan.admissible]  # fmt: skip
    if within:
        return min(within, key=lambda fitting: (round(replay(fitting[1]).period_s, 9), fitting[0]))
    return (min(needs for needs, _ in made), None) if made else None


def _changed(plan: Plan, mix: StrategyAssignment, unit: int) -> Iterator[Plan]:
    """Yield valid plans, without a budget, in which the unit's messages are those of its strategy in the mix."""
    operations = [op for op in mix.ops if op.unit == unit]
    there, messages = set(), list[Message]()
    for m in plan.messages:
        own = tuple(part for part in m.parts if part[0] == unit)
        others = tuple(part for part in m.parts if part[0] != unit)
        same = [op for op in operations if own and _category(op.kind) == _category(m.kind) and op.micro == m.micro]
        if own and same and same[0].kind is m.kind:
            others = m.parts
        elif same:
            messages.append(dataclasses.replace(m, kind=same[0].kind, parts=own))
        there.update(same)
        if others:
            messages.append(dataclasses.replace(m, parts=others))
    whole = tuple((unit, block) for block in range(len(plan.blocks[unit])))
    new, tried = [op for op in operations if op not in there], set[tuple[Message, ...]]()
    for ahead in _AHEAD:
        added = []
        for op in new:
            first, last = mix.period.window(op)
            slot = max(first, last - ahead) if op.kind.is_gather else first
            added.append(Message(op.kind, whole, slot, micro=op.micro))
        if tuple(added) not in tried:
            tried.add(tuple(added))
            with suppress(PlanError):
                yield mix.plan(plan.scheduler, plan.blocks, [*messages, *added])


def _category(kind: Kind) -> Kind:
    """Return the kind that a message of the same place in the period has, whatever the strategy and the group."""
    return Kind.RS if not kind.is_gather else kind.plain


def schedule_choice(plan: Plan) -> ScheduleChoice:
    own, alone = replay(plan), replay(sequential(StrategyAssignment(plan.job, plan.strategies)))
    return ScheduleChoice(own.peak["total"] - alone.peak["total"], own.period_s - alone.period_s)


def binding_slot(plan: Plan) -> BindingSlot:
    curve = replay(plan).curve
    q = max(range(len(curve)), key=lambda q: curve[q]["total"])
    memory = {category: size for category, size in curve[q].items() if category != "total"}
    return BindingSlot(plan.period.name(q), curve[q]["total"], memory)


_SLOTS = 96  # with more slots, neighbouring slots are put into bins


@dataclass(frozen=True)
class Bounds:
    """Lower bounds of the seconds per step of any plan for a job and a budget.

    - traffic: the fewest bytes that strategies within the budget can send, at the link's bandwidth, all overlapped with
      compute.
    - structural: the same with the windows of operations. The first unit has no window, except for gradients that are
      ready before its slot ends.
    - solver: the bound that a planner's solver has proven for the whole slot model.

    The first two are linear relaxations of the loose slot model (:mod:`mdcs.planner.ilp.slot_model`): the schedule
    needs no memory, and units may mix strategies. ``solver_s`` is None when no solver has proven a bound.
    """

    traffic_s: float
    structural_s: float
    solver_s: float | None


def bounds_of(plan: Plan, seconds: float = 60.0) -> Bounds:
    """Return the bounds for the job and the budget of a plan, for any strategies. ``seconds`` limits each of two
    solves. If a solve does not finish, the weaker bound takes its place. The weakest is compute alone."""
    problem = PlanningProblem(plan.job, plan.budget)
    slots = plan.period.length
    model = SlotModel(problem, tight=(), width=1 if slots <= _SLOTS else -(-2 * slots // _SLOTS))
    busy = solve(model.traffic(), seconds=seconds, relax=True).bound or 0.0
    traffic = max(model.compute_s + (1 - 1 / model.slowdown) * busy, busy)
    exposed = solve(model.program, seconds=seconds, relax=True).bound or 0.0
    return Bounds(traffic, max(traffic, model.step_bound(exposed)), plan.bound_s)
