"""Plans from the slot model: solve the model, turn the solution into messages, search from there, report the outcome.

1. The solver decides strategies and, under a budget, the slots in which buffers live
   (:class:`mdcs.planner.ilp.slot_model.Decision`). Within these windows blocks are sent nearest deadline first.
2. While the solver runs, simulated annealing (:mod:`mdcs.planner.anneal`) starts from several heuristics.
3. Annealing continues from the best plan, by replay, for the rest of the time.

The result is never predicted slower than the best heuristic tried, except where messages are merged because this saves
more than it costs. Among equally fast schedules the leanest one is returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from mdcs.options import option
from mdcs.plan.ledger import Ledger
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
from mdcs.plan.worst_case import check, most_in_flight, smallest_budget
from mdcs.planner.anneal import annealed
from mdcs.planner.fit import fit
from mdcs.planner.ilp.priced import priced
from mdcs.planner.ilp.rounding import roundings
from mdcs.planner.ilp.slot_model import Decision, SlotModel
from mdcs.planner.ilp.solver import Answer, Solving, solve
from mdcs.planner.judge import Judge
from mdcs.planner.moves import joined
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.schedulers.fusion import fuse_neighbours
from mdcs.planner.schedulers.priority import Priority, settled
from mdcs.planner.schedulers.wfbp import Partitioning, Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.profile.contents import Contention
from mdcs.simulator.machine_code import compile_loops
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB

_COARSER = 8  # blocks merged into one: plans with few messages are replayed faster in the search
_FINER = (2, 4, 8, 16)  # divisors of the block size that are also tried: smaller blocks need less staging
_FUSED_BLOCKS, _MOST_FUSED = 4, 4 << 20  # most blocks and bytes in a fused message: a larger one waits for its last unit
_SMALL = 36  # up to this many slots only the integer program is solved
_WHOLE = 60  # up to this many slots the integer program is solved in addition to the relaxation
_COARSE = 24  # bins of the first relaxation
_MANY = 20_000  # a plan with this many messages is ranked as if twice as slow to start a search from
_RACING = 6  # heuristic plans that a search starts from
_WORTH = 1e-3  # relative gain that makes another search worth its time
_BEYOND_REPLAY = 5e-5  # s per message beyond the replay; measured 30 to 130 µs on plans with hundreds of messages
_REACH = 32  # ``reach`` of the model for periods of more than four times as many slots

# Phases, as fractions of the time. Heuristics and solving end at these fractions; the other values are durations.
_HEURISTICS = 0.12  # plans to start from
_SOLVING = 0.75  # solver
_DECODING = 0.06  # messages from a solution, after the solver
_FEWER = 0.05  # merging of messages
_LEANER = 0.03  # less memory for the same step

Timed = tuple[float, Plan]
"""(step time by replay in seconds, plan)."""


@dataclass(frozen=True)
class SlotPlanner(Solving):
    """Base of the planners that use the slot model.

    - ``heuristics`` False: only the solver's own plans are compared, to evaluate the solver.
    """

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)
    heuristics: bool = True

    def solved(self, judge: Judge, name: str, fixed: Sequence[Strategy] | None = None) -> Plan:
        """Return the result of :func:`solve_plan` with these options."""
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
    """Return the best plan found within ``seconds`` for ``judge.budget``, with its outcome and the proven bound.

    - ``fixed``: strategies of the units. Only the schedule is then open.
    - ``block_bytes``: size of a block. 0: the default of the profile.
    - ``heuristics``: whether the search also starts from heuristic plans.

    The outcome ends with the gap, (step - bound) / step. ``optimal`` refers to the slot model, and the replay may be
    slower. Raises PlanError if no plan was found.
    """
    compile_loops()  # before the clock starts: the first compilation on a machine takes seconds
    asked = _Asked(judge, name, None if fixed is None else tuple(fixed), solver, seconds, block_bytes, time.monotonic())
    known = list(map(_timed, _until(asked.at(_HEURISTICS), _heuristics(judge, fixed))))
    found = _found(asked, known, heuristics)
    candidates = [*found.plans, *(known if heuristics else [])]
    if not candidates:
        raise PlanError(f"{name}: no plan was found: {found.status}")
    price_s = math.inf
    enough_s = (found.bound or 0.0) * (1 + _WORTH)
    while enough_s < (best := min(map(_price_s, candidates))) < price_s * (1 - _WORTH):  # the last search paid off
        price_s = best
        candidates += asked.raced(candidates, 1 - _FEWER - _LEANER, found.bound, most=1)
    step_s, plan = _of_few_messages(min(candidates, key=_price_s), asked.at(1 - _LEANER))
    begun = plan.scheduler  # a search keeps the name of the plan that it started from
    plan = _leanest(plan, step_s, judge.floor, asked.at(1.0))
    outcome = found.status
    if begun != name:
        gave = any(other.scheduler == name for _, other in found.plans)
        why = "faster than the solver's plan" if gave else "the solver gave nothing"
        outcome = f"best heuristic ({begun}): {why} ({found.status})"
    if found.bound is not None:
        outcome += f", gap {max(0.0, 1 - found.bound / step_s):.1%}"
    return dataclasses.replace(plan, scheduler=name, outcome=outcome, bound_s=found.bound)


@dataclass(frozen=True)
class _Asked:
    """A planning request: the job and budget, the solver, and the time limit."""

    judge: Judge
    name: str
    fixed: tuple[Strategy, ...] | None
    solver: str
    seconds: float
    block_bytes: int
    began: float

    def at(self, part: float) -> float:
        """Return the time at which this fraction of the limit is over."""
        return self.began + part * self.seconds

    @property
    def in_flight(self) -> int:
        """Bytes of the messages that may be in flight, with half the requested block size.

        At most half of the budget's slack.
        """
        assert self.judge.budget is not None
        block = self.block_bytes or self.judge.profile.block
        mix = self.judge.mix([Strategy.fsdp] * len(self.judge.profile.units))
        sent = [message.transient for message in Ledger(Partitioning(block / 2 / MIB).schedule(mix)).messages]
        return min(most_in_flight(sent, self.judge.profile.link.depth), max(0, self.judge.budget - self.judge.floor) // 2)

    def answer(self, model: SlotModel, start: Plan | None = None, *, relax: bool = False) -> Answer:
        """Return the solver's answer for a model, started from ``start`` if the model can express this plan."""
        values = None if start is None else model.values_of(dataclasses.replace(start, job=model.judge.job))
        left = max(1.0, self.at(_SOLVING) - time.monotonic())
        return solve(model.problem, solver=self.solver, seconds=left, start=values, relax=relax)

    def raced(
        self,
        plans: Sequence[Timed],
        part: float,
        bound: float | None,
        stop: Callable[[], bool] = lambda: False,
        most: int = _RACING,
    ) -> list[Timed]:
        """Return the plans of searches that end at fraction ``part`` of the time, by successive halving.

        Each of the ``most`` most promising plans is searched from in turn. The better half of the results is searched
        from again, and so on (Karnin, Koren, Somekh, ICML 2013).
        """
        found: list[Timed] = []
        racing = _likeliest(plans, most)
        rounds = len(racing).bit_length()
        for r in range(rounds):
            until = time.monotonic() + (self.at(part) - time.monotonic()) / (rounds - r)
            better = []
            for i, (_, plan) in enumerate(racing):
                left = (until - time.monotonic()) / (len(racing) - i)
                better.append(
                    _timed(annealed(plan, left, bound=bound or 0.0, strategies=self.fixed is None, stop=stop, seed=r))
                )
            found += better
            racing = _likeliest(better, len(racing) // 2)
        return found

    def decoded(self, decisions: Sequence[Decision]) -> list[Timed]:
        """Return the best plan of these decisions, and the best plan to start a search from, as far as time allows.

        The decision with the best plan is also tried with finer blocks.
        """
        until = time.monotonic() + _DECODING * self.seconds
        made: list[tuple[Timed, Decision]] = []
        for decision in decisions:
            plans = _decoded(self.judge, decision, self.name, self.block_bytes)
            made += [(_timed(plan), decision) for plan in _until(until, plans)]
            if time.monotonic() > until:
                break
        likeliest = [min(made, key=lambda each: _price_s(each[0]))[1]] if made else decisions[:1]
        finer = (plan for each in likeliest for plan in _in_finer_blocks(self.judge, each, self.name, self.block_bytes))
        timed = [*(each for each, _ in made), *map(_timed, _until(until, finer))]
        return [min(timed, key=_price_s), min(timed, key=_patience_s)] if timed else []


@dataclass(frozen=True)
class _Found:
    """Result of the solver.

    - ``status``: status of the solver.
    - ``bound``: proven lower bound (seconds) of any plan's step time.
    - ``plans``: plans with their step times.
    """

    status: str
    bound: float | None
    plans: list[Timed]


def _found(asked: _Asked, known: list[Timed], heuristics: bool) -> _Found:
    """Run solver and heuristic searches in parallel, and return what both found.

    - Small problems are solved as integer programs, large ones are relaxed and rounded, those between are solved in
      both ways.
    - Models for plans spread the costs of a message over a block, and leave room for messages in flight, which the
      model does not count. Small problems are also solved without this room.
    - Models for bounds use costs that no plan can go below.
    """
    judge, slots = asked.judge, asked.judge.job.period.length
    dear = dataclasses.replace(judge, job=dataclasses.replace(judge.job, profile=priced(judge.profile)))
    roomy = dear if judge.budget is None else dataclasses.replace(dear, budget=judge.budget - asked.in_flight)
    tight = dear if slots <= _SMALL else roomy
    bounds = tight.profile is judge.profile and tight.budget == judge.budget
    with ThreadPoolExecutor(3) as pool:
        solving = []
        if slots > _SMALL:
            solving.append(pool.submit(_relaxed, asked, roomy, bounds, plans=True))
        if slots <= _WHOLE or asked.fixed is not None:
            best = min(known, key=_price_s, default=None)
            solving.append(pool.submit(_whole, asked, best, tight, bounds))
            if tight.budget != roomy.budget:
                solving.append(pool.submit(_whole, asked, best, roomy, False))
        if not bounds:
            solving.append(pool.submit(_relaxed, asked, judge, True, plans=False))
        plans: list[Timed] = []
        if known and heuristics:
            plans += asked.raced(known, _SOLVING, None, solving[0].done)
            plans += solving[0].result().plans
            plans += asked.raced(plans, _SOLVING + _DECODING, None, lambda: _all_done(solving), most=1)
        found = [each.result() for each in solving]
    plans += [plan for each in found for plan in each.plans]
    said = [each.status for each in found if each.plans] or [found[0].status]
    bound = max((each.bound for each in found if each.bound is not None), default=None)
    return _Found("optimal" if "optimal" in said else said[0], bound, plans)


def _whole(asked: _Asked, known: Timed | None, judge: Judge, bounds: bool) -> _Found:
    """Solve the integer program. Return a plan, and a bound if the model covers everything that plans may do."""
    model = SlotModel(judge, fixed=asked.fixed, reach=_REACH if judge.job.period.length > 4 * _REACH else None)
    answer = asked.answer(model, None if known is None else known[1])
    bounds = bounds and answer.bound is not None and model.reach is None
    plans = [] if answer.values is None else asked.decoded([model.decide(answer.values)])
    return _Found(answer.status, model.step_bound(answer.bound or 0.0) if bounds else None, plans)


def _relaxed(asked: _Asked, judge: Judge, bounds: bool, *, plans: bool) -> _Found:
    """Solve the linear relaxation of a coarse model, then of finer models while time allows.

    Return the best bound, and plans rounded from the last solution. Solving time is taken to grow in proportion to the
    number of bins.
    """
    slots, bound, status = judge.job.period.length, None, "no answer"
    model = solution = None
    width: int | None = -(-slots // _COARSE)
    while width is not None:
        began = time.monotonic()
        relaxed = SlotModel(judge, fixed=asked.fixed, width=width)
        answer = asked.answer(relaxed, relax=True)
        if answer.bound is not None and bounds:
            bound = max(bound or 0.0, relaxed.step_bound(answer.bound))
        if answer.values is not None:
            model, solution = relaxed, answer.values
        status = "feasible" if solution is not None else answer.status
        width = _finer(width, time.monotonic() - began, asked.at(_SOLVING) - time.monotonic())
    if model is None or solution is None or not plans:
        return _Found(status, bound, [])
    return _Found(status, bound, asked.decoded(list(roundings(model, solution))))


def _finer(width: int, took: float, left: float) -> int | None:
    """Return the bin width (slots) that can be solved in ``left`` seconds.

    None if the model would not be at least twice as fine.
    """
    finer = max(1, math.ceil(width * took / left)) if left > 0 else width
    return finer if 2 * finer <= width else None


def _all_done(futures: Sequence[Future[_Found]]) -> bool:
    return all(future.done() for future in futures)


def _price_s(timed: Timed) -> float:
    """Return the step time plus the cost of messages beyond the replay.

    That cost is 0 for a profile without contention.
    """
    step_s, plan = timed
    return step_s + _beyond_s(plan) * len(plan.messages)


def _beyond_s(plan: Plan) -> float:
    return 0.0 if plan.profile.contention == Contention() else _BEYOND_REPLAY


def _patience_s(timed: Timed) -> float:
    """Return the rank of a plan as the start of a search (lower is better). More messages leave time for fewer replays.
    """
    return _price_s(timed) * (1 + len(timed[1].messages) / _MANY)


def _likeliest(plans: Sequence[Timed], most: int) -> list[Timed]:
    """Return the ``most`` best plans to start a search from, at most one per mix and scheduler."""
    first: dict[tuple[tuple[Strategy, ...], str], Timed] = {}
    for step_s, plan in sorted(plans, key=_patience_s):
        first.setdefault((plan.strategies, plan.scheduler), (step_s, plan))
    return list(first.values())[:most]


def _timed(plan: Plan) -> Timed:
    return replay(plan).period_s, plan


def _of_few_messages(timed: Timed, until: float) -> Timed:
    """Return the plan with neighbouring blocks merged.

    Blocks are merged as long as this costs less step time than the messages cost beyond their replay.
    """
    step_s, plan = timed
    for apart in (False, True):
        for u in range(len(plan.blocks)):
            while time.monotonic() < until and (larger := joined(plan, u, apart=apart)) is not None:
                try:
                    check(larger)
                    seconds = replay(larger).period_s
                except PlanError:
                    break
                if _price_s((seconds, larger)) > _price_s((step_s, plan)):
                    break
                step_s, plan = seconds, larger
    return step_s, plan


def _leanest(plan: Plan, step_s: float, floor: int, until: float) -> Plan:
    """Return the plan with later gathers and earlier reductions: the smallest peak found for its step time."""
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


def _until(deadline: float, plans: Iterator[Plan]) -> Iterator[Plan]:
    """Yield plans while the next can be made before the deadline, if it takes as long as the last.

    Always yield the first.
    """
    began = time.monotonic()
    for plan in plans:
        yield plan
        took, began = time.monotonic() - began, time.monotonic()
        if began + took > deadline:
            return


def _fitted(judge: Judge, plan: Plan, *, fusing: bool = True) -> Iterator[Plan]:
    """Yield the plan fitted to the budget, and a variant with small neighbours fused if ``fusing``.

    Skip plans that do not fit.
    """
    fused = fuse_neighbours(plan, min(_FUSED_BLOCKS * plan.profile.block, _MOST_FUSED)) if fusing else plan
    for each in (plan, fused) if len(fused.messages) < len(plan.messages) else (plan,):
        with contextlib.suppress(PlanError):
            yield each if judge.budget is None else fit(each, judge.budget)


def _roomier(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with room for the next allocation of compute, if possible.

    Without this room the allocation waits for the messages in flight.
    """
    if plan.budget is not None:
        next_bytes = max([slot.allocated for slot in Ledger(plan).slots])
        with contextlib.suppress(PlanError):
            yield dataclasses.replace(fit(plan, plan.budget - next_bytes), budget=plan.budget)


def _decoded(judge: Judge, decision: Decision, name: str, block_bytes: int) -> Iterator[Plan]:
    """Yield the plans of a decision with larger and smaller blocks, as far as they fit."""
    mix = judge.mix(decision.strategies)
    block = block_bytes or mix.profile.block
    coarser = [mix.cut(_COARSER * block)] if not block_bytes else []
    for blocks in dict.fromkeys((*coarser, mix.cut(block), mix.whole())):
        yield from _fitted(judge, settled(mix, name, blocks, decision.windows(mix)))


def _in_finer_blocks(judge: Judge, decision: Decision, name: str, block_bytes: int) -> Iterator[Plan]:
    """Yield the plans of a decision with smaller blocks than requested, if there is a budget.

    Fewer bytes are then in flight.
    """
    mix = judge.mix(decision.strategies)
    block = block_bytes or mix.profile.block
    tried = {mix.cut(block)}
    for parts in _FINER if judge.budget is not None else ():
        blocks = mix.cut(max(1, block // parts))
        if blocks not in tried:
            tried.add(blocks)
            yield from _fitted(judge, settled(mix, name, blocks, decision.windows(mix)), fusing=False)


def _heuristics(judge: Judge, fixed: Sequence[Strategy] | None) -> Iterator[Plan]:
    """Yield the plans of the best heuristics: greedy mixes for several shares of the budget, or the fixed mix.

    The most promising schedulers come first, and for all mixes the schedules with few messages come first.
    """
    mixes = list(dict.fromkeys(_mixes(judge, fixed)))
    coarser = Priority(_COARSER * judge.profile.block / MIB)
    for scheduler in (coarser, Dear(), Wfbp()):
        for mix in mixes:
            for plan in _fitted(judge, scheduler.schedule(mix)):
                yield plan
                yield from _roomier(plan)
    for schedule in (sequential, Priority().schedule, Partitioning().schedule):
        for mix in mixes:
            yield from _fitted(judge, schedule(mix))


def _mixes(judge: Judge, fixed: Sequence[Strategy] | None) -> Iterator[Mix]:
    if fixed is not None or judge.budget is None:
        yield judge.mix(fixed or Greedy().choose(judge).strategies)
        if fixed is None and judge.profile.tells_gradients:  # dp: an early all-reduce needs no gather after it
            yield judge.mix([Strategy.dp] * len(judge.profile.units))
        return
    slack = judge.budget - judge.floor
    for share in (0.25, 0.0, 0.5, 0.75, 1.0):
        part = dataclasses.replace(judge, budget=judge.budget - int(share * slack))
        yield judge.mix(Greedy().choose(part).strategies)
