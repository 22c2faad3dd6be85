"""Plans from the slot model: solve it, turn the solution into messages, search on from there, say what became of it.

The solver decides strategies and, under a budget, from when to when buffers live (:class:`mdcs.planner.ilp.slot_model.Decision`);
within these windows blocks are sent nearest deadline first. Beside the solver, simulated annealing (:mod:`mdcs.planner.anneal`)
races from several heuristics; from the best of all, by replay, it goes on for what is left of the time. So what is returned is
never slower than a heuristic that was tried, but by what fewer messages save; of schedules that are as fast, it is one that
needs least memory.
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
from mdcs.plan.ledger import Ledger, check, most_in_flight, smallest_budget
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Mix, sequential
from mdcs.plan.strategy import Strategy
from mdcs.plan.validity import PlanError
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

_COARSER = 8  # blocks in one: what is searched from has few messages, so that many plans can be replayed
_FINER = (2, 4, 8, 16)  # blocks are tried in these fractions of the asked size, too: smaller ones need less staging
_FUSED_BLOCKS, _MOST_FUSED = 4, 4 << 20  # neighbours are fused up to so many blocks and bytes: more waits long for its last unit
_SMALL = 36  # slots up to which only the whole problem is solved, in integers
_WHOLE = 60  # slots up to which it is solved in integers, too
_COARSE = 24  # bins of the relaxation that is solved first
_MANY = 20_000  # messages that make a plan worth half as much to search from
_RACING = 6  # heuristics' plans that are searched from
_WORTH = 1e-3  # of the step: what makes another race worth its time
_BEYOND_REPLAY = 5e-5  # seconds that a message costs: plans of hundreds ran 30 to 130 µs a message longer than predicted
_REACH = 32  # slots by which a schedule for more than four times as many sends early or late

# Parts of the time, each with an end of its own, counted from the beginning.
_HEURISTICS = 0.12  # for the plans to start from
_SOLVING = 0.75  # for the solver
_DECODING = 0.06  # for messages out of a solution, from when there is one
_FEWER = 0.05  # then for fewer messages
_LEANER = 0.03  # at last, for the same step in less memory

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
    """The best plan found within ``seconds`` for ``judge.budget``, with its outcome and the proven bound.

    The outcome ends with the gap, (step - bound) / step; ``optimal`` says that of the slot model, which the replay may miss.

    ``fixed`` strategies leave only the schedule open. Without ``heuristics`` the search begins at the solver's plans alone.
    Raises PlanError when there is none at all.
    """
    compile_loops()  # the first time on a machine this takes seconds, which are not the search's
    asked = _Asked(judge, name, None if fixed is None else tuple(fixed), solver, seconds, block_bytes, time.monotonic())
    known = list(map(_timed, _until(asked.at(_HEURISTICS), _heuristics(judge, fixed))))
    found = _found(asked, known, heuristics)
    candidates = [*found.plans, *(known if heuristics else [])]
    if not candidates:
        raise PlanError(f"{name}: no plan was found: {found.status}")
    price_s = math.inf
    enough_s = (found.bound or 0.0) * (1 + _WORTH)
    while enough_s < (best := min(map(_price_s, candidates))) < price_s * (1 - _WORTH):  # else another race is worth no time
        price_s = best
        candidates += asked.raced(candidates, 1 - _FEWER - _LEANER, found.bound, most=1)
    step_s, plan = _of_few_messages(min(candidates, key=_price_s), asked.at(1 - _LEANER))
    begun = plan.scheduler  # a search leaves the name of what it began with
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
    """What is to be planned, with what, and until when."""

    judge: Judge
    name: str
    fixed: tuple[Strategy, ...] | None
    solver: str
    seconds: float
    block_bytes: int
    began: float

    def at(self, part: float) -> float:
        """When this part of the time is over."""
        return self.began + part * self.seconds

    @property
    def in_flight(self) -> int:
        """Bytes of as many messages as may be in flight, in blocks half as large as asked; at most half of the budget's slack."""
        assert self.judge.budget is not None
        block = self.block_bytes or self.judge.profile.block
        mix = self.judge.mix([Strategy.fsdp] * len(self.judge.profile.units))
        sent = [message.transient for message in Ledger(Partitioning(block / 2 / MIB).schedule(mix)).messages]
        return min(most_in_flight(sent, self.judge.profile.link.depth), max(0, self.judge.budget - self.judge.floor) // 2)

    def answer(self, model: SlotModel, start: Plan | None = None, *, relax: bool = False) -> Answer:
        """What the solver says of a model, from a plan on if there is one that the model has room for."""
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
        """What searches find until then: each of the likeliest plans has a turn, the better half of what comes of them another
        one, and so on (successive halving; Karnin, Koren, Somekh, ICML 2013).
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
        """Of the plans that these decisions make, as far as there is time, the best, and the best to search from. The decision
        that the best comes of is tried with finer blocks, too.
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
    """What became of the solver: ``plans`` with their step times, a proven ``bound`` of any plan's step time."""

    status: str
    bound: float | None
    plans: list[Timed]


def _found(asked: _Asked, known: list[Timed], heuristics: bool) -> _Found:
    """Small problems in integers, large ones relaxed and rounded, those between both, side by side; a search from the best
    heuristic goes on beside them. Plans are made with what messages cost in blocks and with room for those in flight, which
    the model leaves out; bounds with what no plan goes below. Small problems are solved without that room, too.
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
    """The whole model in integers: a plan, and a bound unless it leaves out what plans may do."""
    model = SlotModel(judge, fixed=asked.fixed, reach=_REACH if judge.job.period.length > 4 * _REACH else None)
    answer = asked.answer(model, None if known is None else known[1])
    bounds = bounds and answer.bound is not None and model.reach is None
    plans = [] if answer.values is None else asked.decoded([model.decide(answer.values)])
    return _Found(answer.status, model.step_bound(answer.bound or 0.0) if bounds else None, plans)


def _relaxed(asked: _Asked, judge: Judge, bounds: bool, *, plans: bool) -> _Found:
    """The linear relaxation of a coarse model, then of as fine ones as there is time for, which goes with the number of bins: the
    best bound, and plans rounded from the last solution.
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
    """How many slots a bin may have that is solved in the seconds that are left; None if that is not much finer."""
    finer = max(1, math.ceil(width * took / left)) if left > 0 else width
    return finer if 2 * finer <= width else None


def _all_done(futures: Sequence[Future[_Found]]) -> bool:
    return all(future.done() for future in futures)


def _price_s(timed: Timed) -> float:
    """The step, with what its messages cost beyond their replay: nothing where nothing was measured beside computing."""
    step_s, plan = timed
    return step_s + _beyond_s(plan) * len(plan.messages)


def _beyond_s(plan: Plan) -> float:
    return 0.0 if plan.profile.contention == Contention() else _BEYOND_REPLAY


def _patience_s(timed: Timed) -> float:
    """What a plan is worth to search from: the more messages, the fewer replays there is time for."""
    return _price_s(timed) * (1 + len(timed[1].messages) / _MANY)


def _likeliest(plans: Sequence[Timed], most: int) -> list[Timed]:
    """Of those that come of one mix and scheduler the one, and of these the few, that are worth most to search from."""
    first: dict[tuple[tuple[Strategy, ...], str], Timed] = {}
    for step_s, plan in sorted(plans, key=_patience_s):
        first.setdefault((plan.strategies, plan.scheduler), (step_s, plan))
    return list(first.values())[:most]


def _timed(plan: Plan) -> Timed:
    return replay(plan).period_s, plan


def _of_few_messages(timed: Timed, until: float) -> Timed:
    """The plan with neighbouring blocks in one, as far as that costs less than messages do beyond their replay."""
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


def _until(deadline: float, plans: Iterator[Plan]) -> Iterator[Plan]:
    """Plans made before the deadline, as far as each takes no longer than the one before it; always the first."""
    began = time.monotonic()
    for plan in plans:
        yield plan
        took, began = time.monotonic() - began, time.monotonic()
        if began + took > deadline:
            return


def _fitted(judge: Judge, plan: Plan, *, fusing: bool = True) -> Iterator[Plan]:
    """The plan within the budget, unless it cannot be made to fit; and one with small neighbours fused, if that is wanted."""
    fused = fuse_neighbours(plan, min(_FUSED_BLOCKS * plan.profile.block, _MOST_FUSED)) if fusing else plan
    for each in (plan, fused) if len(fused.messages) < len(plan.messages) else (plan,):
        with contextlib.suppress(PlanError):
            yield each if judge.budget is None else fit(each, judge.budget)


def _roomier(plan: Plan) -> Iterator[Plan]:
    """The plan with room for what compute allocates next, which else waits for the messages in flight; if it can be made."""
    if plan.budget is not None:
        next_bytes = max([slot.allocated for slot in Ledger(plan).slots])
        with contextlib.suppress(PlanError):
            yield dataclasses.replace(fit(plan, plan.budget - next_bytes), budget=plan.budget)


def _decoded(judge: Judge, decision: Decision, name: str, block_bytes: int) -> Iterator[Plan]:
    """The plans that a decision makes in larger and smaller blocks, as far as they fit."""
    mix = judge.mix(decision.strategies)
    block = block_bytes or mix.profile.block
    coarser = [mix.cut(_COARSER * block)] if not block_bytes else []
    for blocks in dict.fromkeys((*coarser, mix.cut(block), mix.whole())):
        yield from _fitted(judge, settled(mix, name, blocks, decision.windows(mix)))


def _in_finer_blocks(judge: Judge, decision: Decision, name: str, block_bytes: int) -> Iterator[Plan]:
    """The same in blocks smaller than asked, of which less is in flight, if bytes are limited."""
    mix = judge.mix(decision.strategies)
    block = block_bytes or mix.profile.block
    tried = {mix.cut(block)}
    for parts in _FINER if judge.budget is not None else ():
        blocks = mix.cut(max(1, block // parts))
        if blocks not in tried:
            tried.add(blocks)
            yield from _fitted(judge, settled(mix, name, blocks, decision.windows(mix)), fusing=False)


def _heuristics(judge: Judge, fixed: Sequence[Strategy] | None) -> Iterator[Plan]:
    """Greedy mixes at several divisions of the budget, or the fixed mix, under the schedulers that win most often; the
    likeliest first, and of all mixes first what has few messages.
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
        if fixed is None and judge.profile.tells_gradients:  # what leaves early need not be gathered after it
            yield judge.mix([Strategy.dp] * len(judge.profile.units))
        return
    slack = judge.budget - judge.floor
    for share in (0.25, 0.0, 0.5, 0.75, 1.0):
        part = dataclasses.replace(judge, budget=judge.budget - int(share * slack))
        yield judge.mix(Greedy().choose(part).strategies)
