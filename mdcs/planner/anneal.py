"""Better plans by trying: simulated annealing over :mod:`mdcs.planner.moves`, judged by replays alone.

A plan is searched as numbers (:mod:`mdcs.planner.candidates`), of which thousands are replayed in a second.

Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220 (1983).
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import cast

from mdcs.plan.messages import Plan
from mdcs.plan.validity import PlanError
from mdcs.planner.candidates import Candidate, Candidates, Score
from mdcs.planner.moves import MOVES, PLAN_MOVES, Move, PlanMove, restrategize

_WARMTH = 1e-3  # of the step: what a plan may be slower, about, at first
_TRIES = 3  # times the square of the messages: enough candidates
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
    among = Candidates(plan.job, plan.budget)
    found = deque(_improvements(among, plan, seconds, bound, strategies, stop, random.Random(seed)), maxlen=1)
    return among.plan(found[0], plan) if found else plan


def _improvements(
    among: Candidates, plan: Plan, seconds: float, bound: float, strategies: bool, stop: Callable[[], bool], rng: random.Random
) -> Iterator[Candidate]:
    began = time.monotonic()
    weights = {move: often for move, often in MOVES.items() if strategies or move is not restrategize} | PLAN_MOVES
    moves, often = list(weights), list(accumulate(weights.values()))
    now = among.of(plan)
    score = among.score(now, math.inf)
    if score is None:
        return
    best = score.step_s
    most = max(_FEWEST, _TRIES * len(plan.messages) ** 2)
    for tried in range(most):
        spent = max(tried / most, (time.monotonic() - began) / max(seconds, 1e-9))
        if spent >= 1 or best <= bound * (1 + _CLOSE) or stop():
            return
        limit = score.energy - _WARMTH * best * (1 - spent) ** 2 * math.log(1 - rng.random())
        try:
            found = _made(rng.choices(moves, cum_weights=often)[0], among, now, score, plan, rng)
        except PlanError:
            continue
        worth = None if found is None else among.score(found, limit)
        if found is not None and worth is not None:
            now, score = found, worth
            if score.step_s < best * (1 - 1e-9):
                best = score.step_s
                yield now


def _made(
    move: Move | PlanMove, among: Candidates, now: Candidate, score: Score, plan: Plan, rng: random.Random
) -> Candidate | None:
    if move in PLAN_MOVES:
        made = move(among.plan(now, plan), rng)
        return None if made is None else among.of(made)
    return cast(Move, move)(among, now, score, rng)
