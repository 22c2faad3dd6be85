"""Plans and bounds from the slot model: solve it whole, or relax and round it, and turn solutions into messages.

Large models have the memory of the schedule in few slots: first in the one that needs most bytes, which decides bound
and mix, then in slots at equal distances, which decide when buffers live.

Costs: the model sends operations in fractions, so it knows only seconds per byte. Three costs of a block are spread
over its bytes: the gap (or the latency, with one message in flight), the link occupancy while computing, and the lost
compute time. Delays that depend on when a message comes (skew, dispatch, turn) are left to the replay.

Rounding: the relaxation mixes strategies within a unit, about alike in similar units. Rounded one by one, all of these
would get the same strategy. So the bytes by which rounding raises a strategy are subtracted from it in the following
units (Floyd, Steinberg, 1976, in one dimension), and so are the bytes that recomputation frees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mdcs.plan.cost import CostModel
from mdcs.plan.ledger import Ledger
from mdcs.plan.lifetimes import max_in_flight_bytes
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.budget_repair import repair
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.slot_model import SlotDecision, SlotModel
from mdcs.planner.ilp.solver import Answer, solve
from mdcs.planner.priority import COARSER, settled
from mdcs.planner.schedulers import Partitioning
from mdcs.planner.search import EvaluatedPlan, evaluate
from mdcs.profile.link import Contention
from mdcs.profile.recompute import NONE
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB


def linearize_costs(profile: Profile) -> Profile:
    """Return the profile with all costs of a block in β, and lost compute time as interference; the profile itself if
    its link has no gaps and there is no contention.
    """
    link, cost = profile.link, CostModel(profile)
    if not any(link.gap) and profile.contention == Contention():
        return profile
    largest = max(range(len(profile.units)), key=lambda u: profile.layouts[u].grad_bytes)
    layout, beta, lost = profile.layouts[largest], list[float](), 0.0
    elements = max(profile.world, profile.block // layout.grad_width)
    for kind in link.kinds:
        block = cost.message(kind, ((largest, elements),))
        wire = profile.wire(kind, elements * layout.width(kind.is_gather))
        each = (max(block.alpha, block.gap) if link.depth == 1 else block.gap) + block.transfer
        beta.append(each / wire if wire else link.beta_of(kind))
        lost = max(lost, cost.lost_s(wire, block.copy + block.update) / each if each else 0.0)
    lost = 1 - (1 - min(0.9, lost)) / (1 + profile.interference)  # lost compute time, as a fraction of sending time
    none = (0.0,) * len(beta)
    link = dataclasses.replace(link, alpha=none, beta=tuple(beta), gap=none)
    return dataclasses.replace(profile, link=link, contention=Contention(), interference=lost / (1 - lost))


Mix = tuple[tuple[Strategy, ...], tuple[str, ...]]
"""A strategy per unit, and a choice of recomputation per unit (empty: none is open)."""

# Factors on the shares of strategies other than fsdp: whole buffers need more bytes than fractions of buffers.
_KEPT = (0.94, 0.98, 0.92, 0.96, 0.9, 1.0, 0.93, 0.97, 0.95, 0.88, 0.85)
_KEPT_RECOMPUTING = (0.85, 0.9, 0.8, 0.95, 0.82, 0.92, 0.87, 0.75, 0.97, 0.78, 0.94, 0.7)
_FREED = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2)  # factors on bytes that recomputation frees


def mixes(model: SlotModel, values: Sequence[float]) -> list[Mix]:
    """Return mixes near a solution of the relaxed model, the most promising first."""
    kept = _KEPT_RECOMPUTING if model.recompute.columns else _KEPT
    return list(dict.fromkeys(_with_recompute(model, values, _diffused(model, values, each)) for each in kept))


def _diffused(model: SlotModel, values: Sequence[float], kept: float) -> tuple[Strategy, ...]:
    owed = dict.fromkeys(Strategy, 0.0)
    out = []
    for unit, z in zip(model.profile.units, model.assign, strict=True):
        shares = {k: values[x] * (kept if k is not Strategy.fsdp and Strategy.fsdp in z else 1.0) for k, x in z.items()}
        if Strategy.fsdp in z:
            shares[Strategy.fsdp] += 1 - sum(shares.values())
        for k, share in shares.items():
            owed[k] += share * unit.numel
        chosen = max(shares, key=owed.__getitem__)
        owed[chosen] -= unit.numel
        out.append(chosen)
    return tuple(out)


def _with_recompute(model: SlotModel, values: Sequence[float], strategies: tuple[Strategy, ...]) -> Mix:
    """Return the strategies with the choices that free least and with which they fit the budget, or that free most."""
    recompute: tuple[str, ...] = ()
    for more in _FREED if model.recompute.columns else ():
        recompute = _recomputed(model, values, more)
        if model.problem.decided(recompute).fits(strategies):
            break
    return strategies, recompute


def _recomputed(model: SlotModel, values: Sequence[float], more: float) -> tuple[str, ...]:
    """Return choices that free about ``more`` times the solution's bytes: what one unit lacks, the next ones free."""
    out, owed = [NONE] * len(model.profile.units), 0.0
    for u in range(len(out)):
        own = {option: x for option, x in model.recompute.columns.items() if option.unit == u}
        if own:
            owed += more * sum(values[x] * option.freed for option, x in own.items())
            freed = {NONE: 0, **{option.choice: option.freed for option in own}}
            out[u] = min(freed, key=lambda choice: abs(freed[choice] - owed))
            owed -= freed[out[u]]
    return tuple(out)


_SMALL = 36  # HiGHS solves so many slots in seconds
_FINER = (2, 4, 8, 16)  # divisors of the block size that are also tried: smaller blocks need less staging
_COARSE = 12  # bins of the first relaxation
_FINEST = 96  # tight slots of the last
_RISES = 1e-4  # relative gain of a bound for which a finer model is solved
_SENT = (0.5, 0.35, 0.3, 0.4, 0.25)  # fraction of a gather from which its buffer is held
_DECODED = 0.65  # fraction of the time at which plans of relaxations are made
SOLVING, DECODING = 0.75, 0.06  # fractions of the time: when the solver ends, and how long making messages may take


@dataclass(frozen=True)
class SearchRequest:
    """A job and budget to plan for, the planner's name, and the time limit: ``seconds`` from ``began`` on.

    - ``fixed``: strategies of the units. None: open.
    - ``block_bytes``: size of a block. ``coarser``: whether larger blocks may be tried.
    """

    problem: PlanningProblem
    name: str
    fixed: tuple[Strategy, ...] | None
    seconds: float
    block_bytes: int
    coarser: bool
    began: float

    @property
    def is_small(self) -> bool:
        """Return whether the integer program is solved in seconds."""
        return self.problem.job.period.length <= _SMALL

    @property
    def is_priceless(self) -> bool:
        """Return whether messages cost nothing but seconds per byte, so that models of plans are those of bounds."""
        return linearize_costs(self.problem.job.profile) is self.problem.job.profile

    def at(self, part: float) -> float:
        """Return the time at which this fraction of the limit is over."""
        return self.began + part * self.seconds

    def realistic(self) -> PlanningProblem:
        """Return the job for models of plans: their bounds prove nothing, but their plans run as the model says.

        The costs of a message are spread over a block. The budget leaves room for messages in flight, which the model
        does not count: those of half blocks, and at most half of the slack.
        """
        problem, budget = self.problem, self.problem.budget
        if budget is not None:
            mix = problem.mix([Strategy.fsdp] * len(problem.profile.units))
            sizes = Ledger(Partitioning(self.block_bytes / 2 / MIB).schedule(mix)).folded
            in_flight = max_in_flight_bytes(sizes.transient, problem.profile.link.depth)
            budget -= min(in_flight, max(0, budget - problem.floor) // 2)
        job = dataclasses.replace(problem.job, profile=linearize_costs(problem.job.profile))
        return dataclasses.replace(problem, job=job, budget=budget)


@dataclass(frozen=True)
class SolverResult:
    """The solver's status, a proven lower ``bound`` (seconds) of any plan's step, and plans with their step times."""

    status: str
    bound: float | None
    plans: list[EvaluatedPlan]


def solve_whole(request: SearchRequest, problem: PlanningProblem, known: EvaluatedPlan | None) -> SolverResult:
    """Solve the integer program of ``problem``, from the plan ``known`` if the model can express it."""
    model = SlotModel(problem, fixed=request.fixed)
    start = None
    if known is not None:
        job = problem.job.with_recompute(known.plan.recompute)
        start = model.values_of(dataclasses.replace(known.plan, job=job))
    answer = _solved(request, model, start)
    bound = model.step_bound(answer.bound) if answer.bound is not None and problem is request.problem else None
    plans = [] if answer.values is None else decode(request, [model.decide(answer.values)])
    return SolverResult(answer.status, bound, plans)


def solve_bound(request: SearchRequest) -> SolverResult:
    """Return a bound from the relaxation of a coarse model, then of finer ones while time allows and it rises."""
    bound: float | None = None
    for width, tight in _finer(request, request.problem):
        model = SlotModel(request.problem, fixed=request.fixed, width=width, tight=tight)
        answer = _solved(request, model, relax=True)
        if answer.bound is None:
            return SolverResult(answer.status, bound, [])
        before, bound = bound or 0.0, max(bound or 0.0, model.step_bound(answer.bound))
        if bound < before * (1 + _RISES):
            break
    return SolverResult("feasible", bound, [])


def solve_relaxed(request: SearchRequest, problem: PlanningProblem, solved: Callable[[], None]) -> SolverResult:
    """Return plans rounded from the linear relaxation of a coarse model. ``solved`` is called before these are made."""
    width, tight = next(_finer(request, problem))
    model = SlotModel(problem, fixed=request.fixed, width=width, tight=tight)
    model.prefer_lean()
    answer = _solved(request, model, relax=True)
    if answer.values is None:
        return SolverResult(answer.status, None, [])
    solved()
    near = _resolved(request, problem, mixes(model, answer.values))
    return SolverResult("feasible", None, decode(request, near))


def _resolved(request: SearchRequest, realistic: PlanningProblem, near: Sequence[Mix]) -> Iterator[SlotDecision]:
    """Yield decisions of mixes near a relaxation. Windows come from the relaxation of each mix alone, for buffers of
    fractional strategies say little about when whole ones fit. The models get finer while time allows.
    """
    for strategies, recompute in near:
        problem = realistic.decided(recompute)
        for width, tight in itertools.islice(_finer(request, problem), 1, None):
            if time.monotonic() > request.at(SOLVING):
                return
            model = SlotModel(problem, fixed=strategies, width=width, tight=tight)
            model.prefer_lean()
            answer = _solved(request, model, relax=True)
            if answer.values is not None:
                for sent in _SENT if recompute else _SENT[:2]:
                    yield model.decide(answer.values, strategies, sent, recompute)


def _finer(request: SearchRequest, problem: PlanningProblem) -> Iterator[tuple[int, set[int]]]:
    """Yield the width of bins and the tight slots of a coarse model (that slot in which the sequential schedule needs
    most bytes), then of finer ones, of about _FINEST tight slots at last, as long as their relaxations end in time: one
    takes three times as long as the one before.
    """
    length = problem.job.period.length
    needs = problem.sequential_needs(request.fixed or [Strategy.fsdp] * len(problem.profile.units))
    yield -(-length // _COARSE), {needs.index(max(needs))}
    apart, began = -(-length // (2 * _COARSE)), time.monotonic()
    while True:
        yield 2 * apart if apart > 1 else 1, set(range(0, length, apart))
        took, began = time.monotonic() - began, time.monotonic()
        if apart == 1 or length // apart >= _FINEST or began + 3 * took > request.at(SOLVING):
            return
        apart = -(-apart // 2)


def _solved(
    request: SearchRequest, model: SlotModel, start: Sequence[float] | None = None, *, relax: bool = False
) -> Answer:
    left = max(1.0, request.at(SOLVING) - time.monotonic())
    return solve(model.program, seconds=left, start=start, relax=relax)


def decode(request: SearchRequest, decisions: Iterable[SlotDecision]) -> list[EvaluatedPlan]:
    """Return the plans of these decisions, as far as time allows: they differ by some percent, so that many are tried.

    The one with the best plan is also tried with finer blocks (fewer bytes in flight), coarser ones, whole units.
    """
    until = max(time.monotonic() + DECODING * request.seconds, request.at(_DECODED))
    others = [*([COARSER * request.block_bytes] * request.coarser), 0]
    made: list[tuple[EvaluatedPlan, SlotDecision]] = []
    for decision in decisions:
        plans = messages_of(request, decision, [request.block_bytes])
        made += [(each, decision) for each in while_time_remains(until, plans)]
        if time.monotonic() > until:
            break
    if not made:
        return []
    finer = [max(1, request.block_bytes // parts) for parts in _FINER] if request.problem.budget is not None else []
    best = min(made, key=lambda each: each[0].cost_s)[1]
    return [*(each for each, _ in made), *while_time_remains(until, messages_of(request, best, [*finer, *others]))]


def messages_of(request: SearchRequest, decision: SlotDecision, sizes: Sequence[int]) -> Iterator[Plan]:
    """Yield the plans of a decision in blocks of these bytes, as far as they fit. 0: whole units."""
    problem = request.problem.decided(decision.recompute) if request.problem.recomputes else request.problem
    mix = problem.mix(decision.strategies)
    for blocks in dict.fromkeys(mix.partition(size) if size else mix.unpartitioned_blocks() for size in sizes):
        plan = settled(mix, request.name, blocks, decision.windows(mix))
        with contextlib.suppress(PlanError):
            yield plan if problem.budget is None else repair(plan, problem.budget)


def while_time_remains(deadline: float, plans: Iterator[Plan]) -> Iterator[EvaluatedPlan]:
    """Evaluate plans, at least one, until the next would miss the deadline if it took as long as the last."""
    began = time.monotonic()
    for plan in plans:
        yield evaluate(plan)
        took, began = time.monotonic() - began, time.monotonic()
        if began + took > deadline:
            return
