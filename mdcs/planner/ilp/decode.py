"""Plans and bounds from the slot model: solve it whole, or relax and round it, and turn solutions into messages.

Costs: the slot model sends operations in fractions, so it knows only seconds per byte. It plans with a profile in which
three costs of a block are spread over its bytes: the gap (or the latency, with one message in flight at a time), the
link occupancy while computing, and the lost compute time. Delays of contention that depend on when a message comes
(skew, dispatch, turn) are left out: the replay of the plan includes them.

Rounding: the relaxation mixes strategies within a unit, about alike in similar units. Rounded one by one, all such
units would get the same strategy. Therefore the bytes by which rounding raises a strategy are subtracted from the
strategy in the following units (Floyd, Steinberg, 1976, in one dimension), and so are the bytes that recomputation
frees. A buffer is held from the slot by which a given fraction of its gather has been sent.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from mdcs.plan.admission import max_in_flight_bytes
from mdcs.plan.cost import CostModel
from mdcs.plan.ledger import Ledger
from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.planner.feasibility import PlanningProblem
from mdcs.planner.ilp.refine import COARSER, EvaluatedPlan, fitted, while_time_remains
from mdcs.planner.ilp.slot_model import SlotDecision, SlotModel
from mdcs.planner.ilp.solver import Answer, solve
from mdcs.planner.priority import settled
from mdcs.planner.schedulers import Partitioning
from mdcs.profile.link import Contention
from mdcs.profile.recompute import NONE
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB


def linearize_costs(profile: Profile) -> Profile:
    """Return the profile with all costs of a block in β, and lost compute time as interference.

    β of a kind is the seconds of a block divided by its bytes. The profile itself is returned if its link has no gaps
    and there is no contention.
    """
    link, cost = profile.link, CostModel(profile)
    if not any(link.gap) and profile.contention == Contention():
        return profile
    largest = max(range(len(profile.units)), key=lambda u: profile.layouts[u].grad_bytes)
    elements = max(profile.world, profile.block // profile.layouts[largest].grad_width)
    beta, lost = [], 0.0
    for kind in link.kinds:
        block = cost.message(kind, ((largest, elements),))
        wire = profile.wire(kind, elements * profile.layouts[largest].width(kind.is_gather))
        each = (max(block.alpha, block.gap) if link.depth == 1 else block.gap) + block.transfer
        beta.append(each / wire if wire else link.beta_of(kind))
        lost = max(lost, cost.lost_s(wire, block.copy + block.update) / each if each else 0.0)
    lost = 1 - (1 - min(0.9, lost)) / (1 + profile.interference)  # lost compute time, as a fraction of sending time
    none = (0.0,) * len(beta)
    return dataclasses.replace(
        profile,
        link=dataclasses.replace(link, alpha=none, beta=tuple(beta), gap=none),
        contention=Contention(),
        interference=lost / (1 - lost),
    )


Mix = tuple[tuple[Strategy, ...], tuple[str, ...]]
"""A strategy per unit, and a choice of recomputation per unit (empty: none is open)."""

# Factors on the shares of strategies other than fsdp: whole buffers need more bytes than fractions of buffers.
_KEPT = (0.94, 0.98, 0.92, 0.96, 0.9, 1.0, 0.93, 0.97, 0.95, 0.88, 0.85)
_KEPT_RECOMPUTING = (0.85, 0.9, 0.8, 0.95, 0.82, 0.92, 0.87, 0.75, 0.97, 0.78, 0.94, 0.7)
_FREED = (1.0, 1.01, 1.02, 1.03, 1.05, 1.08, 1.12, 1.2)  # factors on bytes that recomputation frees
_SENT = (0.5, 0.4, 0.6)  # fraction of a gather from which its buffer is held


def roundings(model: SlotModel, values: Sequence[float]) -> Iterator[SlotDecision]:
    """Yield decisions near a solution of the relaxed model, the most promising first. They may exceed the budget."""
    for sent in _SENT:
        for strategies, recompute in mixes(model, values):
            yield model.decide(values, strategies, sent, recompute)


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
    """Return choices that free about ``more`` times the bytes of the solution: what one unit lacks, the next ones free.
    """
    out, owed = [NONE] * len(model.profile.units), 0.0
    for u in range(len(out)):
        own = {option: x for option, x in model.recompute.columns.items() if option.unit == u}
        if own:
            owed += more * sum(values[x] * option.freed for option, x in own.items())
            freed = {NONE: 0, **{option.choice: option.freed for option in own}}
            out[u] = min(freed, key=lambda choice: abs(freed[choice] - owed))
            owed -= freed[out[u]]
    return tuple(out)


_FINER = (2, 4, 8, 16)  # divisors of the block size that are also tried: smaller blocks need less staging
_COARSE = 24  # bins of the first relaxation
_SENT_RECOMPUTING = (0.35, 0.5, 0.3, 0.4, 0.25)  # fraction of a gather from which its buffer is held
_DECODED_RECOMPUTING = 0.65  # fraction of the time at which plans of decisions with recomputation are made
SOLVING, DECODING = 0.75, 0.06  # fractions of the time: when the solver ends, and how long making messages may take


@dataclass(frozen=True)
class SearchRequest:
    """A job and budget to plan for, and the time limit.

    - ``name``: name of the planner.
    - ``fixed``: strategies of the units. None: open.
    - ``seconds``, ``began``: the time limit, and the clock when it began.
    - ``block_bytes``: size of a block.
    - ``coarser``: whether larger blocks may be tried.
    """

    problem: PlanningProblem
    name: str
    fixed: tuple[Strategy, ...] | None
    seconds: float
    block_bytes: int
    coarser: bool
    began: float

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
            budget -= min(
                max_in_flight_bytes(sizes.transient, problem.profile.link.depth), max(0, budget - problem.floor) // 2
            )
        job = dataclasses.replace(problem.job, profile=linearize_costs(problem.job.profile))
        return dataclasses.replace(problem, job=job, budget=budget)


@dataclass(frozen=True)
class SolverResult:
    """Result of a solve.

    - ``status``: status of the solver.
    - ``bound``: proven lower bound (seconds) of any plan's step time.
    - ``plans``: plans with their step times.
    """

    status: str
    bound: float | None
    plans: list[EvaluatedPlan]


def solve_whole(request: SearchRequest, problem: PlanningProblem, known: EvaluatedPlan | None) -> SolverResult:
    """Solve the integer program of ``problem``, from the plan ``known`` if the model can express it."""
    model = SlotModel(problem, fixed=request.fixed)
    start = None
    if known is not None:
        job = dataclasses.replace(problem.job, recompute=known.plan.recompute)
        start = model.values_of(dataclasses.replace(known.plan, job=job))
    answer = _solved(request, model, start)
    bound = model.step_bound(answer.bound) if answer.bound is not None and problem is request.problem else None
    plans = [] if answer.values is None else decode(request, [model.decide(answer.values)])
    return SolverResult(answer.status, bound, plans)


def solve_relaxed(
    request: SearchRequest, problem: PlanningProblem, *, plans: bool, solved: Callable[[], None] = lambda: None
) -> SolverResult:
    """Solve the linear relaxation of a coarse model, then of finer models while time allows.

    Return the best bound, and if ``plans``, plans rounded from the last solution. ``solved`` is called before these are
    made. Solving time is taken to grow in proportion to the number of bins.
    """
    bound, status, solution = None, "no answer", None
    width: int | None = -(-problem.job.period.length // _COARSE)
    while width is not None:
        began = time.monotonic()
        model = SlotModel(problem, fixed=request.fixed, width=width)
        answer = _solved(request, model, relax=True)
        if answer.bound is not None and problem is request.problem:
            bound = max(bound or 0.0, model.step_bound(answer.bound))
        if answer.values is not None:
            solution = model, answer.values
        status = "feasible" if solution is not None else answer.status
        width = finer_width(width, time.monotonic() - began, request.at(SOLVING) - time.monotonic())
    if not plans or solution is None:
        return SolverResult(status, bound, [])
    solved()
    model, values = solution
    decisions = _resolved(request, mixes(model, values)) if problem.recomputes else roundings(model, values)
    return SolverResult(status, bound, decode(request, decisions))


def _resolved(request: SearchRequest, near: Sequence[Mix]) -> Iterator[SlotDecision]:
    """Yield decisions of mixes near a relaxation. Their windows come from the relaxation of each mix alone.

    Where activations take what is left, buffers of fractional strategies say little about when whole ones fit.
    """
    realistic = request.realistic()
    for strategies, recompute in near:
        model = SlotModel(realistic.decided(recompute), fixed=strategies)
        answer = _solved(request, model, relax=True)
        for sent in _SENT_RECOMPUTING if answer.values is not None else ():
            yield model.decide(cast(Sequence[float], answer.values), strategies, sent, recompute)


def finer_width(width: int, took: float, left: float) -> int | None:
    """Return the bin width (slots) that can be solved in ``left`` seconds. None if it is more than half of ``width``.
    """
    finer = max(1, math.ceil(width * took / left)) if left > 0 else width
    return finer if 2 * finer <= width else None


def _solved(
    request: SearchRequest, model: SlotModel, start: Sequence[float] | None = None, *, relax: bool = False
) -> Answer:
    left = max(1.0, request.at(SOLVING) - time.monotonic())
    return solve(model.program, seconds=left, start=start, relax=relax)


def decode(request: SearchRequest, decisions: Iterable[SlotDecision]) -> list[EvaluatedPlan]:
    """Return the plans of these decisions, as far as time allows.

    The decision with the best plan is also tried with finer blocks: fewer bytes are then in flight. If recomputation is
    open, it alone is tried with coarser ones: decisions differ by some percent, so that many are tried.
    """
    until, sizes = time.monotonic() + DECODING * request.seconds, [request.block_bytes]
    others = [*([COARSER * request.block_bytes] * request.coarser), request.block_bytes, 0]
    if request.problem.recomputes:
        until = max(until, request.at(_DECODED_RECOMPUTING))
    else:
        sizes, others = others, []
    made: list[tuple[EvaluatedPlan, SlotDecision]] = []
    for decision in decisions:
        made += [(each, decision) for each in while_time_remains(until, messages_of(request, decision, sizes))]
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
        yield from fitted(problem, settled(mix, request.name, blocks, decision.windows(mix)))
