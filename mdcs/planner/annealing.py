"""Search for faster plans by simulated annealing over :mod:`mdcs.planner.neighborhood`, judged by replays.

A plan is searched as numbers (:mod:`mdcs.planner.candidates`). Thousands of candidates are replayed in a second.

Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220 (1983).
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import cast

from mdcs.plan.plan import Plan
from mdcs.plan.validity import PlanError
from mdcs.planner.candidates import Candidate, Candidates, Score
from mdcs.planner.neighborhood import MOVES, PLAN_MOVES, RECOMPUTE_MOVES, Move, PlanMove, change_strategy

_WARMTH = 1e-3  # initial temperature, as a fraction of the step
_TRIES = 3  # candidates to try, per squared number of messages
_FEWEST = 1500  # candidates to try at least
_CLOSE = 1e-5  # the search ends at this relative distance to the bound


def anneal(
    plan: Plan,
    seconds: float,
    *,
    bound: float = 0.0,
    strategies: bool = True,
    recompute: bool = False,
    stop: Callable[[], bool] = lambda: False,
    seed: int = 0,
) -> Plan:
    """Return the fastest plan found by a search from ``plan``, or ``plan`` if none is faster.

    - ``seconds``: approximate time limit.
    - ``bound``: the search ends at this step time (seconds).
    - ``strategies``: whether strategies may change.
    - ``recompute``: whether units may begin or cease to recompute their activations.
    - ``stop``: the search ends when it returns True.
    - ``seed``: seed of the search.

    Plans are judged by replay and stay within the budget of ``plan``. The number of candidates grows with the plan. If
    the time suffices for all of them, the same ``seed`` gives the same plan.
    """
    among = Candidates(plan.job, plan.admissible)
    moves = {move: often for move, often in MOVES.items() if strategies or move is not change_strategy}
    weights = moves | (RECOMPUTE_MOVES if recompute else {}) | PLAN_MOVES
    found = deque(_improvements(among, plan, seconds, bound, weights, stop, random.Random(seed)), maxlen=1)
    return among.plan(found[0], plan) if found else plan


def _improvements(
    among: Candidates, plan: Plan, seconds: float, bound: float, weights: Mapping[Move | PlanMove, float],
    stop: Callable[[], bool], rng: random.Random,
) -> Iterator[Candidate]:  # fmt: skip
    began = time.monotonic()
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
