"""Search for faster plans by simulated annealing over small changes, judged by replays, from several plans in a race.

A plan is searched as numbers (:mod:`mdcs.planner.candidates`). Thousands of candidates are replayed in a second. A move
returns another candidate, or None if it finds nothing to change, and may raise PlanError if the result cannot run.
Moves do not check whether bytes fit.

Kirkpatrick, Gelatt, Vecchi, "Optimization by Simulated Annealing", Science 220 (1983).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mdcs.plan.period import Op, Strategy, blocks_by_readiness, choices, snap_to_parameter_boundary
from mdcs.plan.plan import Plan, PlanError
from mdcs.plan.schedule import Message
from mdcs.planner.budget_repair import with_block_sizes
from mdcs.planner.candidates import Candidate, Candidates, Score
from mdcs.planner.schedulers import StrategyAssignment
from mdcs.profile.link import Contention
from mdcs.profile.recompute import NONE
from mdcs.simulator.simulate import replay

Move = Callable[[Candidates, Candidate, Score, random.Random], Candidate | None]
"""A change to a candidate. The score shows where the candidate stalls."""

_NEAR = (1, 1, 1, 2, 2, 3, 4, 6, 9, 14)  # distances that messages move, in places: mostly short ones
_MOST_PARTS = 8  # most blocks of a unit


# ---- moves


def advance_blocking(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Move the message that compute waits for to an earlier place. Long waits are chosen most often."""
    waited = np.cumsum(np.where(score.needed > 0, score.waits, 0.0))
    if waited[-1] <= 0:
        return None
    q = int(np.searchsorted(waited, rng.random() * waited[-1], "right"))
    i = int(score.needed[q]) - 1
    place = max(0, i - rng.choice(_NEAR))
    return _moved(among, now, i, place, now.slots[place])


def shift(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Move a message a few places or slots earlier or later."""
    n = len(now.messages)
    i = rng.randrange(n)
    far = rng.choice(_NEAR) * rng.choice((-1, 1))
    if rng.random() < 0.5:
        return _moved(among, now, i, min(n, max(0, i + far)), rng.choice((0, among.length)))
    slot = among.slot_near(now, i, far)
    ends = bisect.bisect_left(now.slots, slot), bisect.bisect_right(now.slots, slot)
    return _moved(among, now, i, rng.choice((*ends, rng.randint(*ends))), slot)


def swap(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Exchange two messages that are near each other."""
    i = rng.randrange(len(now.messages))
    j = i + rng.choice(_NEAR)
    if j >= len(now.messages):
        return None
    messages = list(now.messages)
    messages[i], messages[j] = messages[j], messages[i]
    return now._replace(messages=messages)


def shift_run(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Move several neighbours, all or those of one kind, or all blocks of an operation, some slots earlier or later."""
    n = len(now.messages)
    begin, slots, changed = rng.randrange(n), list(now.slots), False
    if rng.random() < 0.5:
        far, what = rng.choice((-2, -1, 1, 2)), rng.choice((None, True, False))
        run = range(begin, min(n, begin + rng.choice((2, 3, 4, 6, 8))))
        chosen = [i for i in run if what is None or among.all[now.messages[i]].kind.is_gather is what]
    else:
        far, first = rng.choice(_NEAR) * rng.choice((-1, 1)), among.all[now.messages[begin]]
        units = {u for u, _ in first.parts}
        chosen = [
            i for i, m in enumerate(map(among.all.__getitem__, now.messages))
            if m.kind is first.kind and m.micro == first.micro and not units.isdisjoint(u for u, _ in m.parts)
        ]  # fmt: skip
    for i in chosen:
        slots[i], changed = among.slot_near(now, i, far), True
    if not changed:
        return None
    places = sorted(range(n), key=slots.__getitem__)
    return now._replace(messages=[now.messages[i] for i in places], slots=[slots[i] for i in places])


def change_strategy(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Change the strategy of one unit, or of two: often the second takes the first one's, for about the same bytes.

    Operations that both strategies have keep their place, all blocks at once: gathers where the first block was,
    reductions where the last was. A new reduction is sent when it is ready, a new gather shortly before it is needed.
    """
    units, profile = range(len(now.strategies)), among.job.profile
    u, possible = rng.choice(units), choices(profile, among.admissible is not None)
    changes = {u: rng.choice([k for k in possible if k is not now.strategies[u]])}
    if len(units) > 1 and rng.random() < 0.6:
        v = u + rng.choice((-4, -3, -2, -1, 1, 2, 3, 4)) if rng.random() < 0.5 else rng.choice(units)
        if v in units and v != u:
            changes[v] = now.strategies[u] if rng.random() < 0.7 else rng.choice(possible)
    mix = StrategyAssignment(among.job, tuple(changes.get(u, k) for u, k in enumerate(now.strategies)))
    if mix.strategies == now.strategies:
        return None
    ops = dict.fromkeys(op for op in mix.ops if op.unit in changes)
    at: dict[Op, int] = {}  # place of an operation that stays, all blocks together
    for place, m in enumerate(map(among.all.__getitem__, now.messages)):
        for op in (Op(m.kind, v, m.micro) for v, _ in m.parts if v in changes):
            if op in ops and not (op.kind.is_gather and op in at):
                at[op] = place
    messages: list[int] = []
    slots: list[int] = []

    def send(parts: Iterable[tuple[tuple[int, int], ...]], like: Message, slot: int, place: int) -> None:
        found = [among.number(dataclasses.replace(like, parts=each), mix.strategies, now.blocks) for each in parts]
        messages[place:place] = found
        slots[place:place] = [slot] * len(found)

    for place, (number, slot) in enumerate(zip(now.messages, now.slots, strict=True)):
        m = among.all[number]
        kept = tuple([part for part in m.parts if part[0] not in changes])
        if len(kept) == len(m.parts):
            messages.append(number)
            slots.append(slot)
            continue
        here = [v for v in dict.fromkeys(v for v, _ in m.parts) if at.get(Op(m.kind, v, m.micro)) == place]
        parts = kept + tuple((v, b) for v in here for b in blocks_by_readiness(profile, v, now.blocks[v]))
        if len(m.parts) > 1 and parts:  # stays fused, in one message per type
            send(profile.by_type(m.kind, parts), m, slot, len(messages))
        else:
            send([(part,) for part in parts], m, slot, len(messages))
    for op in ops:
        if op not in at:
            first, last = mix.period.window(op)
            slot = max(first, last - rng.choice((1, 2, 3, 4, 6, 8))) if op.kind.is_gather else first
            slot %= among.length
            place = rng.randint(bisect.bisect_left(slots, slot), bisect.bisect_right(slots, slot))
            blocks = blocks_by_readiness(profile, op.unit, now.blocks[op.unit])
            send([((op.unit, b),) for b in blocks], Message(op.kind, (), slot, micro=op.micro), slot, place)
    return Candidate(messages, slots, mix.strategies, now.blocks, now.recompute)


def change_recompute(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Change what one unit recomputes. Often another unit takes the first one's choice in exchange, which keeps the
    bytes about the same, or the strategy of a unit changes, too: bytes that are freed buy strategies, and vice versa.
    """
    options = among.options
    if not options:
        return None
    recompute = list(now.recompute) or [NONE] * len(now.strategies)
    u = rng.choice(sorted(options))
    before, recompute[u] = recompute[u], rng.choice([c for c in options[u] if c != recompute[u]])
    others = [v for v, known in options.items() if v != u and recompute[v] == recompute[u] and before in known]
    if others and rng.random() < 0.5:
        recompute[rng.choice(others)] = before
    changed = now._replace(recompute=() if set(recompute) == {NONE} else tuple(recompute))
    return change_strategy(among, changed, score, rng) if rng.random() < 0.4 else changed


def _moved(among: Candidates, now: Candidate, i: int, place: int, slot: int) -> Candidate | None:
    """Move the message at place ``i`` before the message at ``place``, to ``slot`` or the nearest slot that its
    neighbours and its window allow. Return None if nothing changes or no slot is possible.
    """
    messages, slots, length = list(now.messages), list(now.slots), among.length
    number, before = messages.pop(i), slots.pop(i)
    place -= place > i
    low = slots[place - 1] if place else 0
    high = slots[place] if place < len(slots) else length - 1
    slot = min(high, max(low, slot))
    first, last = among.window(number)
    if not (first <= slot <= last or first <= slot + length <= last):
        inside = [q for q in range(low, high + 1) if first <= q <= last or first <= q + length <= last]
        if not inside:
            return None
        slot = min(inside, key=lambda q: abs(q - slot))
    if place == i and slot == before:
        return None
    messages.insert(place, number)
    slots.insert(place, slot)
    return now._replace(messages=messages, slots=slots)


def repartition(among: Candidates, now: Candidate, score: Score, rng: random.Random) -> Candidate | None:
    """Send a unit in twice as many blocks, or half as many. Takes as long as a dozen other moves."""
    plan = among.plan(now)
    u = rng.randrange(len(plan.blocks))
    before = len(plan.blocks[u])
    count = rng.choice((before * 2, before // 2, before // 2))
    total, step = plan.profile.layouts[u].elements, 16 * plan.world  # blocks are multiples of ``step``
    if not 1 <= count <= _MOST_PARTS or total < step * count:
        return None
    cuts = [total * b // count // step * step for b in range(1, count)]
    inner = [snap_to_parameter_boundary(plan.profile, u, cut, step, total // count) for cut in cuts]
    sizes = tuple(b - a for a, b in itertools.pairwise([0, *inner, total]))
    return among.of(with_block_sizes(plan, u, sizes))


MOVES: dict[Move, float] = {
    advance_blocking: 1, shift: 5, swap: 3, shift_run: 5, change_strategy: 3, change_recompute: 3, repartition: 0.2,
}  # fmt: skip
"""All moves, and the relative frequency of each."""


# ---- searches

_WARMTH = 1e-3  # initial temperature, as a fraction of the step
_TRIES = 3  # candidates to try, per squared number of messages
_FEWEST = 1500  # candidates to try at least
_CLOSE = 1e-5  # the search ends at this relative distance to the bound


def anneal(
    plan: Plan, seconds: float, *, bound: float = 0.0, strategies: bool = True, recompute: bool = False,
    stop: Callable[[], bool] = lambda: False, seed: int = 0,
) -> Plan:  # fmt: skip
    """Return the fastest plan found by a search from ``plan``, or ``plan`` if none is faster.

    - ``seconds``: approximate time limit. ``bound``: the search ends at this step time (seconds). ``stop``: or when
      this returns True.
    - ``strategies``, ``recompute``: whether strategies, and what units recompute, may change.

    Plans are judged by replay and stay within the budget of ``plan``. The number of candidates grows with the plan. If
    the time suffices for all of them, the same ``seed`` gives the same plan.
    """
    among, rng = Candidates(plan.job, plan.admissible), random.Random(seed)
    moves = {move: often for move, often in MOVES.items() if recompute or move is not change_recompute}
    schedules = {move: often for move, often in moves.items() if move is not change_strategy}
    # A strategy is judged by the schedule that it gets, so schedules come first.
    for weights in (schedules, moves) if strategies else (schedules,):
        found = _annealed(among, plan, seconds / (1 + strategies), bound, weights, stop, rng)
        plan = plan if found is None else among.plan(found, plan)
    return plan


def _annealed(
    among: Candidates, plan: Plan, seconds: float, bound: float, weights: Mapping[Move, float],
    stop: Callable[[], bool], rng: random.Random,
) -> Candidate | None:  # fmt: skip
    """Return the fastest candidate found. None: none is faster than the plan."""
    began = time.monotonic()
    moves, often = list(weights), list(itertools.accumulate(weights.values()))
    now = among.of(plan)
    fastest: Candidate | None = None
    score = among.score(now, math.inf)
    if score is None:
        return None
    best = score.step_s
    most = max(_FEWEST, _TRIES * len(plan.messages) ** 2)
    for tried in range(most):
        spent = max(tried / most, (time.monotonic() - began) / max(seconds, 1e-9))
        if spent >= 1 or best <= bound * (1 + _CLOSE) or stop():
            break
        limit = score.energy - _WARMTH * best * (1 - spent) ** 2 * math.log(1 - rng.random())
        try:
            found = rng.choices(moves, cum_weights=often)[0](among, now, score, rng)
        except PlanError:
            continue
        worth = None if found is None else among.score(found, limit)
        if found is not None and worth is not None:
            now, score = found, worth
            if score.step_s < best * (1 - 1e-9):
                best, fastest = score.step_s, now
    return fastest


_BEYOND_REPLAY = 5e-5  # s per message beyond the replay; measured 30 to 130 µs on plans with hundreds of messages


class EvaluatedPlan(NamedTuple):
    """A plan and its step time by replay, in seconds."""

    step_s: float
    plan: Plan

    @property
    def cost_s(self) -> float:
        """The step, plus the cost of messages beyond the replay, which is 0 for a profile without contention."""
        alone = self.plan.profile.contention == Contention()
        return self.step_s + (0.0 if alone else _BEYOND_REPLAY * len(self.plan.messages))


def evaluate(plan: Plan) -> EvaluatedPlan:
    """Replay a plan."""
    return EvaluatedPlan(replay(plan).period_s, plan)


RACING = 3  # plans that a race starts from


def race(
    plans: Sequence[EvaluatedPlan], until: float, *, strategies: bool, recompute: bool = False,
    bound: float | None = None, stop: Callable[[], bool] = lambda: False, most: int = RACING,
) -> list[EvaluatedPlan]:  # fmt: skip
    """Return the plans of searches that end at the time ``until``, by successive halving.

    Each of the ``most`` best plans is searched from in turn. The better half of the results is searched from again, and
    so on (Karnin, Koren, Somekh, ICML 2013). ``strategies``, ``recompute``, ``bound``, ``stop``: see :func:`anneal`.
    """
    found: list[EvaluatedPlan] = []
    racing = most_promising(plans, most)
    rounds = len(racing).bit_length()
    for r in range(rounds):
        ends = time.monotonic() + (until - time.monotonic()) / (rounds - r)
        better = []
        for i, (_, plan) in enumerate(racing):
            left = (ends - time.monotonic()) / (len(racing) - i)
            found_here = anneal(
                plan, left, bound=bound or 0.0, strategies=strategies, recompute=recompute, stop=stop, seed=r
            )
            better.append(evaluate(found_here))
        found += better
        racing = most_promising(better, len(racing) // 2)
    return found


def most_promising(plans: Sequence[EvaluatedPlan], most: int) -> list[EvaluatedPlan]:
    """Return the ``most`` best plans, at most one per mix, recomputation and scheduler."""
    first: dict[tuple[tuple[Strategy, ...], tuple[str, ...], str], EvaluatedPlan] = {}
    for each in sorted(plans, key=lambda each: each.cost_s):
        first.setdefault((each.plan.strategies, each.plan.recompute, each.plan.scheduler), each)
    return list(first.values())[:most]
