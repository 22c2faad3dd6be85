"""Better plans by trying: simulated annealing over :mod:`mdcs.planner.moves`, judged by replays alone.

Thousands of plans are replayed, so what a candidate may fail at is asked for cheapest first: the seconds for which its
messages keep the link, its step if bytes did not count, its bytes, and then the step that admission leaves it.

Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220 (1983).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import NamedTuple

from mdcs.plan.ledger import Ledger, needs
from mdcs.plan.messages import Plan
from mdcs.plan.validity import PlanError
from mdcs.planner.moves import MOVES, SCHEDULE_MOVES, Move
from mdcs.simulator.recurrence import Course, Trace, run

_WARMTH = 2e-3  # of the step: what a plan may be slower, about, at first
_TRIES = 3  # times the square of the messages: enough candidates
_TIGHT, _POWER = 0.05, 4  # of the step, what bytes cost: this part times the mean of (bytes / budget) to this power over slots
_FEWEST = 1500  # candidates
_CLOSE = 1e-5  # to the bound: done


def annealed(
    plan: Plan,
    seconds: float,
    *,
    bound: float = 0.0,
    strategies: bool = True,
    stop: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> Plan:
    """The fastest plan found from ``plan`` on, by replay, within its budget and about ``seconds``; itself if none is faster.

    Its strategies stay as they are without ``strategies``. The search ends early at a step of ``bound`` seconds, and when it is
    told to ``stop``. It tries a number of candidates that grows with the plan; with time for all of them the same ``seed`` gives
    the same plan.
    """
    moves = MOVES if strategies else SCHEDULE_MOVES
    for better in _improvements(plan, seconds, bound, moves, stop, random.Random(seed)):
        plan = better
    return plan


def _improvements(
    plan: Plan, seconds: float, bound: float, weights: Mapping[Move, float], stop: Callable[[], bool], rng: random.Random
) -> Iterator[Plan]:
    began = time.monotonic()
    moves, often = list(weights), list(accumulate(weights.values()))
    state = _State.of(plan, math.inf)
    if state is None:
        return
    best = state.step_s
    most = max(_FEWEST, _TRIES * len(plan.messages) ** 2)
    for tried in range(most):
        spent = max(tried / most, (time.monotonic() - began) / max(seconds, 1e-9))
        if spent >= 1 or best <= bound * (1 + _CLOSE) or stop():
            return
        limit = state.energy - _WARMTH * best * (1 - spent) ** 2 * math.log(1 - rng.random())
        try:
            candidate = rng.choices(moves, cum_weights=often)[0](state.plan, state.trace, rng)
            found = None if candidate is None else _State.of(candidate, limit)
        except PlanError:
            continue
        if found is not None:
            state = found
            if state.step_s < best * (1 - 1e-9):
                best = state.step_s
                yield state.plan


class _State(NamedTuple):
    """A plan that fits, what its replay gave, and what annealing makes small: the step, longer by the bytes of all slots.

    Bytes that are held without need stand in the way of moves to come, most of all where they are tight.
    """

    plan: Plan
    trace: Trace
    step_s: float
    energy: float

    @classmethod
    def of(cls, plan: Plan, limit: float) -> _State | None:
        """A plan whose bytes fit and whose energy is no more than ``limit`` seconds. Raises PlanError as a replay."""
        course = Course(plan)
        if sum([cost.idle for cost in course.costs]) > limit:
            return None
        trace = run(plan, course, None)
        step_s = trace.ended - trace.began
        if step_s > limit:
            return None
        if plan.budget is None:
            return cls(plan, trace, step_s, step_s)
        ledger, cap = Ledger(plan), plan.budget - plan.reserve
        held = [need.bytes / cap for need in needs(plan, ledger)]
        if max(held) > 1:
            return None
        tight = _TIGHT * sum([x**_POWER for x in held]) / len(held)
        if step_s * (1 + tight) > limit:
            return None
        trace = run(plan, course, ledger)
        step_s = trace.ended - trace.began
        energy = step_s * (1 + tight)
        return None if energy > limit else cls(plan, trace, step_s, energy)
