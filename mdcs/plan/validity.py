"""Rules that a plan keeps: every block is sent once, in its window, and nothing is gathered before its update.

:func:`mdcs.plan.worst_case.check` checks whether the bytes fit a budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from mdcs.plan.job import Job
from mdcs.plan.period import Period
from mdcs.plan.schedule import (
    BACKWARDS,
    NO_SLOT,
    OUTSIDE,
    REASONS,
    STALE,
    Message,
    MessageTable,
    Schedule,
    arrange,
    empty_schedule,
)
from mdcs.plan.strategy import Strategy
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile


class PlanError(ValueError):
    """A plan that cannot run. The message names the unit, the message or the slot."""


Blocks = tuple[tuple[int, ...], ...]
"""For each unit, the elements of each block."""


def validate(
    job: Job, strategies: tuple[Strategy, ...], blocks: Blocks, messages: Sequence[Message], budget: int | None
) -> None:
    """Raise PlanError for a plan that cannot run.

    The messages must carry every block of every unit exactly once per kind. An issue slot must lie in its window. A
    gather must not overtake the reduction that it depends on.
    """
    units = job.profile.units
    require_nodes(job.profile, strategies)
    if budget is not None and budget <= job.reserve:
        raise PlanError(f"budget {budget} bytes leaves nothing beside the reserve of {job.reserve}")
    if not len(strategies) == len(blocks) == len(units):
        raise PlanError(f"{len(units)} units but {len(strategies)} strategies, {len(blocks)} block lists")
    empty = next((i for i, m in enumerate(messages) if not m.parts), None)
    if empty is not None:
        raise PlanError(f"message {empty} is empty")
    _check_contents(job, strategies, blocks, messages)


def require_nodes(profile: Profile, strategies: Iterable[Strategy]) -> None:
    """Raise PlanError for a strategy within nodes if the profile has no nodes."""
    within = next((k for k in strategies if k.in_node), None)
    if within is not None and not profile.per_node:
        raise PlanError(
            f"{within} shards within a node: it needs several hosts with several ranks each, and a profile of them"
        )


Block = tuple[Kind, int, int, int]
"""(kind, unit, micro-step, block): a piece that one message carries."""


@lru_cache(maxsize=256)  # a planner compares many plans of one mix
def _expected(period: Period, strategies: tuple[Strategy, ...], blocks: tuple[tuple[int, ...], ...]) -> set[Block]:
    """Return every block that the strategies require. Raises PlanError for invalid block sizes."""
    world = period.profile.world
    out: set[Block] = set()
    for u, (unit, strategy, sizes) in enumerate(zip(period.profile.units, strategies, blocks, strict=True)):
        layout = period.profile.layouts[u]
        total = layout.elements
        if sizes != (total,) and (sum(sizes) != total or any(b <= 0 or b % world for b in sizes)):
            raise PlanError(
                f"unit {unit.name}: blocks {sizes} must be multiples of the world, {world}, and sum to {total}"
            )
        if layout.is_whole and len(sizes) > 1:
            raise PlanError(f"unit {unit.name}: blocks {sizes} cut parameters that are updated as wholes")
        for kind in strategy.kinds(unit.trainable, unit.backward is not None):
            micros = period.micro_steps if kind.is_gather and strategy.sharded else 1
            out.update([(kind, u, micro, b) for micro in range(micros) for b in range(len(sizes))])
    return out


def _check_contents(job: Job, strategies: tuple[Strategy, ...], blocks: Blocks, messages: Sequence[Message]) -> None:
    """Check that the messages carry exactly the blocks that the strategies require, each once."""
    units = job.profile.units
    expected = _expected(job.period, strategies, blocks)
    carried = [(m.kind, u, m.micro, b) for m in messages for u, b in m.parts]
    if len(carried) == len(expected) and set(carried) == expected:
        for i, m in enumerate(messages):
            if len(m.parts) > 1 and len({units[u].dtype_on_wire(m.kind.is_gather) for u, _ in m.parts}) > 1:
                raise PlanError(f"{_where(job, messages, i)}: carries elements of several types")
        return
    for i, m in enumerate(messages):
        for u, b in m.parts:
            if (m.kind, u, m.micro, b) not in expected:
                raise PlanError(f"{_where(job, messages, i)}: the strategies have no block {b} of unit {u} to send")
    for (kind, u, _, b), times in Counter(carried).items():
        if times != 1:
            raise PlanError(f"block {b} of {units[u].name} is sent {times} times as {kind}")
    kind, u, micro, b = min(expected.difference(carried))
    raise PlanError(f"block {b} of {units[u].name} is never sent as {kind} (micro-step {micro})")


def arranged(job: Job, table: MessageTable, messages: Sequence[Message]) -> Schedule:
    """Return the schedule of a plan's messages, numbered in wire order. Raises PlanError for an order that cannot run.
    """
    schedule, slots = empty_schedule(len(messages), job.period), [m.slot for m in messages]
    found = arrange(table, job.period.turn, range(len(messages)), slots, schedule)
    if found == 0:
        return schedule
    i, reason = divmod(found, REASONS)
    slot, length = slots[i], job.period.length
    raise PlanError(
        f"{_where(job, messages, i)}: "
        + {
            NO_SLOT: f"no slot {slot} in a period of {length}",
            BACKWARDS: f"issue slot {slot} comes before {slots[i - 1]} of the message ahead of it",
            OUTSIDE: f"issue slot {slot} is outside its window {table.first[i]}..{table.last[i]}",
            STALE: "gathers parameters before their update",
        }[reason]
        + ("" if job.cross_iteration else "; cross_iteration is off")
    )


def _where(job: Job, messages: Sequence[Message], i: int) -> str:
    """Return the message in words. Its units may not exist."""
    message, units = messages[i], job.profile.units
    names = (units[u].name if 0 <= u < len(units) else f"unit {u}" for u, _ in message.parts)
    return f"message {i} ({message.kind} of {', '.join(names)})"
