"""What makes a plan one that can be run: all is sent once, in its window, and nothing is gathered before it is updated.

Whether its bytes fit a budget is asked elsewhere (:func:`mdcs.plan.ledger.check`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from mdcs.plan.period import Period
from mdcs.plan.strategy import Strategy
from mdcs.plan.widths import by_width
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind

if TYPE_CHECKING:
    from mdcs.plan.messages import Plan


class PlanError(ValueError):
    """A plan that cannot be run: the message names the unit, the message or the slot."""


def validate(plan: Plan) -> None:
    """Raise PlanError when the messages do not carry every block of every unit exactly once per kind, when an issue slot lies
    outside its window, or when the order lets a gather overtake the reduction it depends on.
    """
    units = plan.profile.units
    require_nodes(plan.profile, plan.strategies)
    if plan.budget is not None and plan.budget <= plan.reserve:
        raise PlanError(f"budget {plan.budget} bytes leaves nothing beside the reserve of {plan.reserve}")
    if not len(plan.strategies) == len(plan.blocks) == len(units):
        raise PlanError(f"{len(units)} units but {len(plan.strategies)} strategies, {len(plan.blocks)} block lists")
    empty = next((i for i, m in enumerate(plan.messages) if not m.parts), None)
    if empty is not None:
        raise PlanError(f"message {empty} is empty")
    _check_contents(plan)
    _check_order(plan)
    if not plan.cross_iteration:
        _check_barrier(plan)


def require_nodes(profile: Profile, strategies: Iterable[Strategy]) -> None:
    """Raise PlanError for a strategy within nodes where the profile knows of none."""
    within = next((k for k in strategies if k.in_node), None)
    if within is not None and not profile.per_node:
        raise PlanError(f"{within} shards within a node: it needs several hosts with several ranks each, and a profile of them")


Block = tuple[Kind, int, int, int]
"""Kind, unit, micro-step and block of what is sent in one piece."""


@lru_cache(maxsize=256)  # a planner compares many plans of one mix
def _expected(period: Period, strategies: tuple[Strategy, ...], blocks: tuple[tuple[int, ...], ...]) -> set[Block]:
    """Every block that the strategies ask for. Raises PlanError for blocks that cannot be."""
    world = period.profile.world
    out: set[Block] = set()
    for u, (unit, strategy, sizes) in enumerate(zip(period.profile.units, strategies, blocks, strict=True)):
        layout = period.profile.layouts[u]
        total = layout.elements
        if sizes != (total,) and (sum(sizes) != total or any(b <= 0 or b % world for b in sizes)):
            raise PlanError(f"unit {unit.name}: blocks {sizes} must be multiples of the world, {world}, and sum to {total}")
        if len(layout.ends) > 1 and not set(layout.ends).issubset(itertools.accumulate(sizes)):
            raise PlanError(f"unit {unit.name}: blocks {sizes} must be cut where its sections end, at {layout.ends}")
        for kind in strategy.kinds(unit.trainable, unit.backward is not None):
            micros = period.micro_steps if kind.is_gather and strategy.sharded else 1
            out.update([(kind, u, micro, b) for micro in range(micros) for b in range(len(sizes))])
    return out


def _check_contents(plan: Plan) -> None:
    """What the messages carry is what the strategies ask for, once."""
    units = plan.profile.units
    expected = _expected(plan.period, plan.strategies, plan.blocks)
    carried = [(m.kind, u, m.micro, b) for m in plan.messages for u, b in m.parts]
    if len(carried) == len(expected) and set(carried) == expected:
        for i, m in enumerate(plan.messages) if plan.profile.is_mixed else ():
            if by_width(plan.profile, plan.blocks, m.kind, m.parts) != [m.parts]:
                raise PlanError(f"{_where(plan, i)}: carries elements of several widths")
        return
    for i, m in enumerate(plan.messages):
        for u, b in m.parts:
            if (m.kind, u, m.micro, b) not in expected:
                raise PlanError(f"{_where(plan, i)}: the strategies have no block {b} of unit {u} to send")
    for (kind, u, _, b), times in Counter(carried).items():
        if times != 1:
            raise PlanError(f"block {b} of {units[u].name} is sent {times} times as {kind}")
    kind, u, micro, b = min(expected.difference(carried))
    raise PlanError(f"block {b} of {units[u].name} is never sent as {kind} (micro-step {micro})")


def _check_order(plan: Plan) -> None:
    """Messages are in the order of their issue slots, in their windows, and gather nothing before its reduction."""
    units, length = plan.profile.units, plan.period.length
    reduced: set[tuple[int, int]] = set()
    previous = 0
    for i, (message, (first, last)) in enumerate(zip(plan.messages, plan.windows, strict=True)):
        slot = message.slot
        if not previous <= slot < length:
            if not 0 <= slot < length:
                raise PlanError(f"{_where(plan, i)}: no slot {slot} in a period of {length}")
            raise PlanError(f"{_where(plan, i)}: issue slot {slot} comes before {previous} of the message ahead of it")
        previous = slot
        if not first <= (slot if slot >= first else slot + length) <= last:
            raise PlanError(f"{_where(plan, i)}: issue slot {slot} is outside its window {first}..{last}")
        if message.kind.plain is Kind.RS:
            reduced.update(message.parts)
        elif message.kind.plain is Kind.AG_F and message.micro == 0:
            for part in message.parts:
                if part not in reduced and units[part[0]].trainable:
                    raise PlanError(
                        f"{_where(plan, i)}: gathers block {part[1]} of {units[part[0]].name} before its reduce-scatter"
                    )


def _where(plan: Plan, i: int) -> str:
    """The message in words; its units need not exist."""
    message, units = plan.messages[i], plan.profile.units
    names = (units[u].name if 0 <= u < len(units) else f"unit {u}" for u, _ in message.parts)
    return f"message {i} ({message.kind} of {', '.join(names)})"


def _check_barrier(plan: Plan) -> None:
    reductions = [i for i, m in enumerate(plan.messages) if not m.kind.is_gather]
    late = [i for i in reductions if plan.messages[i].slot > plan.period.turn]
    if late:
        raise PlanError(f"message {late[0]} reduces after the turn, but cross_iteration is off")
    for i, m in enumerate(plan.messages[: reductions[-1] if reductions else 0]):
        updated = any(plan.profile.units[u].trainable for u, _ in m.parts)
        if m.kind.plain is Kind.AG_F and m.micro == 0 and updated:
            raise PlanError(f"message {i} gathers before the barrier that message {reductions[-1]} ends")
