"""Plans from the slot model: solve it, turn the solution into messages, replay them, say what became of it.

The solver decides strategies and, under a budget, from when to when buffers live (:class:`mdcs.planner.ilp.slot_model.Decision`);
within these windows blocks are sent nearest deadline first, which is optimal for one link. What is returned is the best
by replay of the solver's plans and the heuristics' that it was warm-started with; of its schedules that are as fast, the
one that needs least memory.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from mdcs.options import option
from mdcs.plan.ledger import smallest_budget
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.planner.fit import fit
from mdcs.planner.ilp.slot_model import Decision, SlotModel
from mdcs.planner.ilp.solver import Answer, Solving, solve
from mdcs.planner.judge import Judge
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.fusion import fuse_neighbours
from mdcs.planner.schedulers.priority import Priority, settled
from mdcs.planner.schedulers.wfbp import Partitioning, Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB

_FINER = (2, 4, 8, 16)  # blocks are tried in these fractions of the asked size, too: smaller ones need less staging
_FUSED_BLOCKS, _MOST_FUSED = 4, 4 << 20  # neighbours are fused up to so many blocks and bytes: more waits long for its last unit
_SMALL = 36  # slots up to which only the whole problem is solved, strategies and schedule at once
_WHOLE = 60  # slots up to which it is solved in integers
_COARSE = 24  # bins of the model that decides the strategies of larger problems
_FINE = 96  # slots up to which their bound is proven without bins; beyond, by half as many bins
_HEURISTICS = 0.15  # of the time, for the plans to start from
_STRATEGIES = 0.55  # of what is left, for the strategies; then their schedule
_DECODING = 0.08  # of the time, for messages out of the solution
_LEANER = 0.04  # of the time, for the same step in less memory
_REACH = 32  # slots by which a schedule for more than four times as many sends early or late

Timed = tuple[float, Plan]
"""A plan and its step time by replay, in seconds."""


@dataclass(frozen=True)
class SlotPlanner(Solving):
    """What plans by the slot model. Without ``heuristics`` only the solver's own plans are compared, to judge it by."""

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)
    heuristics: bool = True

    def solved(self, judge: Judge, name: str, fixed: Sequence[Strategy] | None = None) -> Plan:
        """:func:`solve_plan` with these options."""
        return solve_plan(
            judge, name, fixed=fixed, solver=self.solver, seconds=self.seconds, heuristics=self.heuristics,
            block_bytes=0 if self.block_mib is None else max(1, int(self.block_mib * MIB)),
        )  # fmt: skip


def solve_plan(
    judge: Judge,
    name: str,
    *,
    fixed: Sequence[Strategy] | None = None,
    solver: str = "HIGHS",
    seconds: float = 20.0,
    block_bytes: int = 0,
    heuristics: bool = True,
) -> Plan:
    """The best plan found in about ``seconds`` for ``judge.budget``, with its outcome and the proven bound.

    The outcome ends with the gap, (step - bound) / step; ``optimal`` says that of the slot model, which the replay may miss.

    ``fixed`` strategies leave only the schedule open. Without ``heuristics`` only the solver's own plans are compared.
    Raises PlanError when there is none at all.
    """
    deadline = time.monotonic() + seconds
    known = _best(_until(deadline - (1 - _HEURISTICS) * seconds, _heuristics(judge, fixed)))
    found = _solved(judge, name, fixed, known, block_bytes, solver, deadline, _DECODING * seconds)
    candidates = [*found.plans, *([known] if known is not None and heuristics else [])]
    if not candidates:
        raise PlanError(f"{name}: no plan was found: {found.status}")
    step_s, plan = min(candidates, key=lambda c: c[0])
    plan = _leanest(plan, step_s, judge.floor, time.monotonic() + _LEANER * seconds)
    outcome = found.status
    if found.plans and plan.scheduler != name:
        outcome = f"best heuristic ({plan.scheduler}): faster than the solver's plan ({found.status})"
    elif not found.plans:
        outcome = f"best heuristic ({plan.scheduler}): the solver gave nothing ({found.status})"
    if found.bound is not None:
        outcome += f", gap {max(0.0, 1 - found.bound / step_s):.1%}"
    return dataclasses.replace(plan, scheduler=name, outcome=outcome, bound_s=found.bound)


@dataclass(frozen=True)
class _Found:
    """What the solver gave: ``plans`` with their step times, a proven ``bound`` of any plan's step time."""

    status: str
    bound: float | None
    plans: list[Timed]


def _solved(
    judge: Judge,
    name: str,
    fixed: Sequence[Strategy] | None,
    known: Timed | None,
    block_bytes: int,
    solver: str,
    deadline: float,
    decoding_s: float,
) -> _Found:
    """Small problems whole. Of larger ones first the strategies, then their schedule, twice at once: with strategies by the
    whole problem, and by a coarse relaxation of it. Of the largest the whole is relaxed, only for its bound.
    """

    def ask(model: SlotModel, part: float = 1.0, *, relax: bool = False) -> Answer:
        start = None if known is None or relax else model.values_of(known[1])
        left = max(1.0, part * (deadline - decoding_s - time.monotonic()))
        return solve(model.problem, solver=solver, seconds=left, start=start, relax=relax)

    def in_two_steps(model: SlotModel) -> _Found:
        answer = ask(model, _STRATEGIES)
        bound = None if answer.bound is None else model.step_bound(answer.bound)
        if answer.values is None:
            return _Found(answer.status, bound, [])
        mix = model.decide(answer.values).strategies
        schedule = _solved(judge, name, mix, None, block_bytes, solver, deadline, decoding_s)
        proven = answer.status == schedule.status == "optimal" and not model.coarse
        return _Found("optimal" if proven else "feasible", bound, schedule.plans)

    def only_bound(model: SlotModel) -> _Found:
        answer = ask(model, relax=True)
        return _Found(answer.status, None if answer.bound is None else model.step_bound(answer.bound), [])

    slots = judge.job.period.length
    if slots <= _SMALL or fixed is not None:
        model = SlotModel(judge, fixed=fixed, reach=_REACH if slots > 4 * _REACH else None)
        answer = ask(model)
        bound = None if answer.bound is None or model.reach is not None else model.step_bound(answer.bound)
        best = None
        if answer.values is not None:
            best = _best(_until(deadline, _decoded(judge, model.decide(answer.values), name, block_bytes)))
        return _Found(answer.status, bound, [] if best is None else [best])
    fine = SlotModel(judge, width=1 if slots <= _FINE else -(-slots // (_FINE // 2)))
    coarse = SlotModel(judge, width=-(-slots // _COARSE))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(in_two_steps if slots <= _WHOLE else only_bound, fine)
        found = [in_two_steps(coarse), other.result()]
    plans = [plan for each in found for plan in each.plans]
    status = "optimal" if found[1].status == "optimal" and found[1].plans else "feasible" if plans else found[0].status
    return _Found(status, max((each.bound for each in found if each.bound is not None), default=None), plans)


def _leanest(plan: Plan, step_s: float, floor: int, until: float) -> Plan:
    """The plan with gathers as late and reductions as early as costs no time: the smallest peak for its step time."""
    low, high = floor, smallest_budget(plan)
    while high - low > high // 200 and time.monotonic() < until:
        middle = (low + high) // 2
        try:
            leaner = dataclasses.replace(fit(dataclasses.replace(plan, budget=None), middle), budget=plan.budget)
            as_fast = replay(leaner).period_s <= step_s * (1 + 1e-6)
        except PlanError:
            as_fast = False
        if as_fast:
            plan, high = leaner, middle
        else:
            low = middle
    return plan


def _best(plans: Iterator[Plan]) -> Timed | None:
    """The plan with the shortest step."""
    timed = [(replay(plan).period_s, plan) for plan in plans]
    return min(timed, key=lambda t: t[0], default=None)


def _until(deadline: float, plans: Iterator[Plan]) -> Iterator[Plan]:
    """Plans made before the deadline; always the first."""
    for plan in plans:
        yield plan
        if time.monotonic() > deadline:
            return


def _fitted(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """The plan within the budget, unless it cannot be made to fit; and with neighbours fused, if there are small ones."""
    fused = fuse_neighbours(plan, min(_FUSED_BLOCKS * plan.profile.block, _MOST_FUSED))
    for each in (plan, fused) if len(fused.messages) < len(plan.messages) else (plan,):
        try:
            yield each if judge.budget is None else fit(each, judge.budget)
        except PlanError:
            continue


def _decoded(judge: Judge, decision: Decision, name: str, block_bytes: int) -> Iterator[Plan]:
    mix = judge.mix(decision.strategies)
    windows = decision.windows(mix)
    block = block_bytes or mix.profile.block
    tried = set()
    finer = (mix.cut(max(1, block // parts)) for parts in _FINER if judge.budget is not None)
    for blocks in (mix.cut(block), mix.whole(), *finer):
        if blocks not in tried:
            tried.add(blocks)
            yield from _fitted(judge, settled(mix, name, blocks, windows))


def _heuristics(judge: Judge, fixed: Sequence[Strategy] | None) -> Iterator[Plan]:
    """Greedy mixes at several divisions of the budget, or the fixed mix, under the schedulers that win most often; the
    likeliest first.
    """
    tried = set()
    for mix in _mixes(judge, fixed):
        if mix in tried:
            continue
        tried.add(mix)
        for scheduler in (Priority(), Dear(), Partitioning(), Wfbp()):
            yield from _fitted(judge, scheduler.schedule(mix))
        yield from _fitted(judge, sequential(mix))


def _mixes(judge: Judge, fixed: Sequence[Strategy] | None) -> Iterator[Mix]:
    if fixed is not None or judge.budget is None:
        yield judge.mix(fixed or Greedy().choose(judge).strategies)
        return
    slack = judge.budget - judge.floor
    for share in (0.25, 0.0, 0.5, 0.75, 1.0):
        part = dataclasses.replace(judge, budget=judge.budget - int(share * slack))
        yield judge.mix(Greedy().choose(part).strategies)
