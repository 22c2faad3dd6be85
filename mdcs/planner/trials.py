"""Plans that a run tries, and the choice among them: a handful that differ, made in a process of its own beside a run
that trains, and successive halving by measured steps.

A prediction is wrong by some percent. Among many plans, the best predicted one is the one that the model flatters most.
So the run trains under a few of them in turns (Karnin, Koren, Somekh: successive halving, ICML 2013).
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import NormalDist, median
from typing import NamedTuple, TypeVar, cast

import numpy as np

from mdcs.plan.job import Job, chosen_options
from mdcs.plan.period import Strategy, choices
from mdcs.plan.plan import Plan, PlanError
from mdcs.planner.feasibility import InfeasibleBudget, PlanningProblem, StrategyDecision
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.ilp.strategy_ilp import Ilp
from mdcs.planner.pipeline import JointPlanner, Scheduler, StrategyPlanner, make_plan
from mdcs.planner.priority import Priority
from mdcs.planner.recompute import AUTO, RecomputeRule, ladder, recompute_named
from mdcs.planner.schedulers import Dear, Fusion, MgWfbp, Wfbp
from mdcs.planner.strategies import Greedy
from mdcs.sizes import MIB

T = TypeVar("T")

# ---- plans that differ

_BLOCKS = (1, 4, 16)  # sizes of blocks, in blocks that saturate the link
_BUCKETS = 6  # fused messages of a pass: about as many as DDP makes of a model of 150 MiB
_STEPS = 8  # of recomputation from none to the most: so far apart are plans that differ in it
_WORST = 0.35  # a plan that is predicted to be slower than the best by this part is not tried
_ERRORS = 3  # nor, beside two plans, one that is slower by so many times the error of predictions
_LEAST = 0.03  # which is at least this
_ALIKE = 0.005  # relative difference of predictions up to which plans with the same contents of messages are alike


def make_plans(
    job: Job, strategy: StrategyPlanner | JointPlanner, scheduler: Scheduler | None, *, budget: int | None,
    schedule_share: float | None, recompute: RecomputeRule, trials: int, seconds: float,
) -> list[Plan]:  # fmt: skip
    """Return the plan of :func:`mdcs.planner.pipeline.make_plan`, and up to ``trials`` - 1 of its :func:`proposals`."""
    plan = make_plan(job, strategy, scheduler, budget=budget, schedule_share=schedule_share, recompute=recompute)
    return [plan] if job.profile.world == 1 else proposals(plan, trials, recompute=recompute, seconds=seconds)


def proposals(
    plan: Plan, count: int, *, recompute: str | RecomputeRule | None = None, seconds: float = 5.0
) -> list[Plan]:
    """Return ``plan`` and up to ``count`` - 1 others of its job and budget that differ from it and from each other.

    They take turns between kinds of plans, in each the best predicted first: another integer program's (in so many
    ``seconds``; 0: none), messages of whole units, blocks of three sizes, fused buckets, and a step more or less of
    recomputation if the rule ``recompute`` leaves that to the plan. No two send the same messages with the same
    strategies, but for a few that move without a gain. Of a profile that has been compared with plans that it was not
    fitted to, more than one other is returned only if it is predicted to be slower than the best by no more than a few
    times :attr:`mdcs.Profile.prediction_error`.
    """
    if count < 2:
        return [plan]
    kinds = [sorted(kind, key=_predicted_s) for kind in _kinds(plan, recompute, seconds)]
    best = min([_predicted_s(plan), *(_predicted_s(kind[0]) for kind in kinds if kind)])
    error = plan.profile.prediction_error
    near = best * (1 + (_WORST if error is None else min(_WORST, max(_LEAST, _ERRORS * error))))
    kinds.sort(key=lambda kind: _predicted_s(kind[0]) if kind else math.inf)
    chosen = [plan]
    for turn in zip_longest(*kinds):
        for each in turn:
            if len(chosen) == count:
                return chosen
            worst = near if len(chosen) > 1 else best * (1 + _WORST)
            if each and _predicted_s(each) <= worst and not any(_is_alike(each, other) for other in chosen):
                chosen.append(each)
    return chosen


@dataclass(frozen=True)
class _Given:
    """The strategy planner of a given mix."""

    strategies: tuple[Strategy, ...]
    name: str

    def choose(self, problem: PlanningProblem) -> StrategyDecision:
        problem.require(self.strategies, f"strategies {self.name}")
        return StrategyDecision(self.strategies)


def _kinds(plan: Plan, recompute: str | RecomputeRule | None, seconds: float) -> Iterator[list[Plan]]:
    """Yield the plans of each kind."""
    job, block, whole = plan.job, plan.profile.block, sum(layout.grad_bytes for layout in plan.profile.layouts)
    mixes = _mixes(plan)
    yield _made(plan, mixes, [Dear(), MgWfbp(), Wfbp()])
    for times in _BLOCKS:
        yield _made(plan, mixes, [Priority(times * block / MIB)])
    bucket_mib = whole / _BUCKETS / MIB
    yield _made(plan, mixes, [Fusion(bucket_mib), Dear(bucket_mib)])
    for other in _other_recompute(job, recompute) if plan.budget is not None else ():
        yield _made(plan, [Greedy()], [Priority(), Dear()], other)
    if seconds > 0:
        with contextlib.suppress(InfeasibleBudget, PlanError):
            is_joint = plan.strategy == Joint.name
            planner, scheduler = (Ilp(seconds), Priority()) if is_joint else (Joint(seconds), None)
            yield [make_plan(job, planner, scheduler, budget=plan.budget)]


def _mixes(plan: Plan) -> list[_Given]:
    """Return the plan's own mix, greedy's, and the uniform ones that fit the budget."""
    problem = PlanningProblem(plan.job, plan.budget)
    mixes = {plan.strategies: plan.strategy}
    with contextlib.suppress(InfeasibleBudget):
        mixes.setdefault(Greedy().choose(problem).strategies, Greedy.name)
    for k in choices(plan.job.profile):
        alike = problem.mix([k] * len(plan.strategies)).strategies
        if problem.fits(alike):
            mixes.setdefault(alike, str(k))
    return [_Given(strategies, name) for strategies, name in mixes.items()]


def _made(
    plan: Plan, mixes: Sequence[_Given | Greedy], schedulers: Sequence[Scheduler], job: Job | None = None
) -> list[Plan]:
    out = []
    for mix in mixes:
        for scheduler in schedulers:
            with contextlib.suppress(InfeasibleBudget, PlanError):
                out.append(make_plan(job or plan.job, mix, scheduler, budget=plan.budget))
    return out


def _other_recompute(job: Job, recompute: str | RecomputeRule | None) -> list[Job]:
    """Return the job with a step less and a step more of recomputation, if the rule leaves it to the plan."""
    rule = recompute_named(recompute) if isinstance(recompute, str) else recompute
    is_open = rule is not None and (rule.choices(job.profile) is None or (rule == AUTO and bool(job.recompute)))
    if not is_open or not job.profile.recompute:
        return []
    steps = ladder(job)
    seconds = [sum(o.seconds for o in chosen_options(each.profile, each.recompute)) for each in (job, *steps)]
    near = min(range(len(steps)), key=lambda k: abs(seconds[k + 1] - seconds[0]))
    far = max(1, len(steps) // _STEPS)
    return [steps[k] for k in (near - far, near + far) if 0 <= k < len(steps)]


def _is_alike(one: Plan, other: Plan) -> bool:
    """Return whether two plans have equal strategies and messages, and neither order is predicted to be faster."""
    if (one.strategies, one.recompute) != (other.strategies, other.recompute) or _sent(one) != _sent(other):
        return False
    return one.messages == other.messages or abs(_predicted_s(one) - _predicted_s(other)) <= _ALIKE * _predicted_s(one)


def _sent(plan: Plan) -> Counter[object]:
    return Counter((m.kind, m.micro, tuple((u, b, plan.blocks[u]) for u, b in m.parts)) for m in plan.messages)


def _predicted_s(plan: Plan) -> float:
    return math.inf if plan.prediction is None else plan.prediction.step_s


# ---- calls in a process of its own: threads of this one do not wait for the interpreter while it plans

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from mdcs.planner.trials import answer
answer()
"""


def call_apart(function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)``, called in a new process that ends with this one. All are pickled. Raises what
    the function raises, and ChildProcessError if the process ends otherwise.
    """
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(child.kill)
    try:
        said, _ = child.communicate(pickle.dumps(sys.path) + pickle.dumps((function, arguments)))
    finally:
        atexit.unregister(child.kill)
        child.kill()
    if child.returncode:
        raise ChildProcessError(f"the process that plans ended with exit status {child.returncode}")
    value, error = pickle.loads(said)
    if error is not None:
        raise error
    return cast(T, value)


def answer() -> None:
    """Call the function that stdin says, and write its value or its error to stdout. What it prints goes to stderr."""
    function, arguments = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        told: tuple[object, Exception | None]
        try:
            told = function(*arguments), None
        except Exception as error:  # any error is the caller's
            told = None, error
        pickle.dump(told, out)


# ---- which one is fastest

_TAIL = 0.02  # chance that the fastest of equal candidates counts as faster than some other one after a round
_SPLIT = 10  # steps from which two candidates take turns twice
_EXACT = 1e-9  # relative difference of steps that counts as none
_SPIKE = 0.1  # a step counts at most so much longer than the shortest counted one of its candidate


class Standing(NamedTuple):
    """A candidate's measurements: the ``rounds`` that it took part in, and the ``steps`` that were counted.

    - ``median_s``: median seconds of these steps. NaN without any.
    - ``slower_s``: seconds by which a step is longer than the winner's (before the end: than the fastest's), by steps
      of the same rounds. NaN without any.
    - ``interval_s``: half of its 96 % interval, for all candidates together. Infinite with too few steps.
    - ``dropped``: the round (from 1) after which the candidate was dropped. None: never.
    """

    candidate: int
    rounds: int
    steps: int
    median_s: float
    slower_s: float
    interval_s: float
    dropped: int | None


class SuccessiveHalving:
    """Find the fastest of ``count`` candidates in at most ``steps`` steps.

    In a round every candidate takes a turn of some steps, in an order that is reversed from round to round: a drift of
    the machine slows all of them alike. The first step of a turn is not counted. Then the candidates that are slower by
    more than the interval of a paired test leave, and of more than two the slower half. The fastest one that is left
    goes on; of equal ones that with the lowest number.

    Every rank must be told the same seconds: those of the slowest. Leave out a step that did more than train. Raises
    ValueError for ``count`` below 1, and for fewer than two steps per candidate.
    """

    def __init__(self, count: int, *, steps: int = 20) -> None:
        if count < 1 or (count > 1 and steps < 2 * count):
            raise ValueError(f"{count} candidates need at least 1 candidate and 2 steps each, got {steps} steps")
        self._count, self._left = count, steps
        self._seconds: list[tuple[int, int, float]] = []  # (candidate, round, seconds) of each counted step
        self._dropped: dict[int, int] = {}
        self._round, self._counted = 0, 0  # steps counted of this turn
        self._is_warm = False  # whether the candidate ran in the step before
        self.winner: int | None = None
        self._begin_round(list(range(count)))

    @property
    def current(self) -> int:
        """The candidate that the next step runs."""
        return self._turns[0] if self.winner is None else self.winner

    @property
    def turn(self) -> int:
        """Steps until the turn of :attr:`current` ends; 0 after the end."""
        return 0 if self.winner is not None else self._length - self._counted + (not self._is_warm)

    def add(self, seconds: float) -> None:
        """Take the seconds (above 0, else ValueError) of a step that ran :attr:`current`; ignored after the end."""
        if not 0 < seconds < math.inf:
            raise ValueError(f"a step takes seconds above 0, got {seconds}")
        if self.winner is not None:
            return
        self._left -= 1
        if not self._is_warm:
            self._is_warm = True
            return
        self._seconds.append((self._turns[0], self._round, seconds))
        self._counted += 1
        if self._counted == self._length:
            self._turns.pop(0)
            self._counted, self._is_warm = 0, False
            if not self._turns:
                self._end_round()

    def table(self) -> tuple[Standing, ...]:
        """Return the measurements of all candidates, by number."""
        reference = self._fastest() if self.winner is None else self.winner
        slower = self._slower_than(reference)
        out = []
        for c in range(self._count):
            own = [(r, s) for candidate, r, s in self._seconds if candidate == c]
            middle = median(s for _, s in own) if own else math.nan
            out.append(Standing(c, len({r for r, _ in own}), len(own), middle, *slower[c], self._dropped.get(c)))
        return tuple(out)

    def _begin_round(self, candidates: Sequence[int]) -> None:
        """Begin a round of these candidates, or end if there is one, or too few steps are left."""
        self._candidates, self._turns = list(candidates), list(candidates)
        self._round += 1
        many = len(candidates)
        if many == 1 or self._left < 2 * many:
            self.winner = self._fastest()
            return
        rounds = (many - 1).bit_length() if many > 2 else 1 + (self._left >= _SPLIT)
        self._length = max(1, (self._left // rounds - many) // many)  # counted steps of a turn

    def _end_round(self) -> None:
        slower, ran = self._slower_than(self._fastest()), self._candidates
        stay = sorted((c for c in ran if slower[c][0] <= slower[c][1]), key=lambda c: (slower[c][0], c))
        if len(ran) > 2:
            stay = stay[: max(2, (len(ran) + 1) // 2)]
        self._dropped.update((c, self._round) for c in ran if c not in stay)
        self._begin_round([c for c in reversed(ran) if c in stay])

    def _fastest(self) -> int:
        """Return the candidate with the shortest steps, of those that have not been dropped."""
        if not self._seconds:
            return self._candidates[0]
        slower = self._slower_than(self._candidates[0])
        return min(self._candidates, key=lambda c: (round(slower[c][0] / _EXACT), c))

    def _slower_than(self, reference: int) -> list[tuple[float, float]]:
        """Return for each candidate by how many seconds its steps are longer, and half of the 96 % interval. By least
        squares: a step takes what its candidate and its round take. So candidates are compared within rounds.
        """
        shortest = {c: min(s for each, _, s in self._seconds if each == c) for c, *_ in self._seconds}
        # What disturbed a step is cut off. The first step of a turn is no measure: it waits for no step before it.
        rows = [(c, r, min(s, (1 + _SPIKE) * shortest[c])) for c, r, s in self._seconds]
        keys = {("candidate", c) for c, _, _ in rows} | {("round", r) for _, r, _ in rows}
        columns = {key: i for i, key in enumerate(sorted(keys))}
        unknown = math.nan, math.inf
        if ("candidate", reference) not in columns:
            return [unknown] * self._count
        design, seconds = np.zeros((len(rows), len(columns))), np.array([s for *_, s in rows])
        for i, (c, r, _) in enumerate(rows):
            design[i, columns["candidate", c]] = design[i, columns["round", r]] = 1
        inverse = np.linalg.pinv(design.T @ design)
        effects = inverse @ design.T @ seconds
        freedom = len(rows) - int(np.linalg.matrix_rank(design))
        variance = float(np.sum((seconds - design @ effects) ** 2)) / freedom if freedom else math.inf
        factor = _student(freedom, _TAIL / max(1, self._count - 1))
        out = []
        for c in range(self._count):
            contrast = np.zeros(len(columns))
            contrast[columns["candidate", reference]] = -1
            if ("candidate", c) not in columns:
                out.append(unknown)
            elif c == reference:
                out.append((0.0, 0.0))
            else:
                contrast[columns["candidate", c]] = 1
                interval = factor * math.sqrt(variance * float(contrast @ inverse @ contrast)) if freedom else math.inf
                out.append((float(contrast @ effects), max(interval, _EXACT * float(seconds.mean()))))
        return out


def _student(freedom: int, tail: float) -> float:
    """Return the quantile of Student's t that is exceeded with probability ``tail``."""
    if freedom < 1:
        return math.inf
    if freedom == 1:
        return math.tan(math.pi * (0.5 - tail))
    if freedom == 2:
        return float((1 - 2 * tail) * math.sqrt(2 / (4 * tail * (1 - tail))))
    z = NormalDist().inv_cdf(1 - tail)  # an expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**k for k, term in enumerate(terms, 1))
