"""Reductions that need not wait for the end of a slot: their gradients are there before.

While the last backward slot of a unit runs, its gradients come one after the other, mostly from its last parameter to its first
(:attr:`mdcs.profile.contents.Unit.gradients`). A reduction that the plan issues when compute arrives at the next slot may leave
as soon as those of its blocks are there, if all messages ahead of it have been issued and its bytes fit. DDP's buckets leave so.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache

from mdcs.plan.message import Message
from mdcs.plan.period import Period
from mdcs.profile.contents import Profile


def early(
    period: Period, blocks: Sequence[tuple[int, ...]], messages: Sequence[Message], windows: Sequence[tuple[int, int]]
) -> tuple[float, ...]:
    """For each message the part of the slot before its own that is over when it may leave; 1: compute must arrive at its own.

    Only reductions leave early, at the head of those of their slot, and only if that is the first at which they can be issued.
    """
    if not period.profile.tells_gradients:
        return (1.0,) * len(messages)
    out, slot, so_far = [], -1, 0.0
    for message, (first, _) in zip(messages, windows, strict=True):
        if message.slot != slot:
            slot, so_far = message.slot, 0.0
        if so_far < 1:
            leaves = slot == first and not message.kind.is_gather and not message.blocking
            so_far = max(so_far, part_of_slot(period, blocks, message, first)) if leaves else 1.0
        out.append(so_far)
    return tuple(out)


def part_of_slot(period: Period, blocks: Sequence[tuple[int, ...]], message: Message, first: int) -> float:
    """The part of the slot before ``first``, a reduction's first, that is over when all its gradients are there."""
    return max(
        parts_of_slot(period.profile, u, blocks[u])[b]
        for u, b in message.parts
        if period.windows[message.kind, u, message.micro][0] == first
    )


def parts_of_slot(profile: Profile, unit: int, blocks: tuple[int, ...]) -> tuple[float, ...]:
    """For each block of a unit the part of its last backward slot that is over when all its gradients are there."""
    gradients = profile.units[unit].gradients
    if not gradients:
        return (1.0,) * len(blocks)
    return _parts_of(gradient_ends(profile, unit), tuple(part for _, part in gradients), blocks)


def in_order(profile: Profile, unit: int, blocks: tuple[int, ...]) -> list[int]:
    """The blocks of a unit in the order in which their gradients come."""
    return sorted(range(len(blocks)), key=parts_of_slot(profile, unit, blocks).__getitem__)


def gradient_ends(profile: Profile, unit: int) -> tuple[int, ...]:
    """Where parameters end in the unit's flat buffer, in elements, padding included; nothing if not known when gradients come."""
    return profile.layouts[unit].segment_ends([n for n, _ in profile.units[unit].gradients])


def share_within(profile: Profile, unit: int) -> float:
    """Of the bytes of a unit's gradients those that are there before its last backward slot ends."""
    layout, gradients = profile.layouts[unit], profile.units[unit].gradients
    begin, within = 0, 0
    for (_, part), end in zip(gradients, gradient_ends(profile, unit), strict=True):
        if part < 1:
            within += (end - begin) * layout.sections[layout.index(begin)].grad_bytes
        begin = end
    return within / layout.grad_bytes


def needed(profile: Profile, unit: int, blocks: tuple[int, ...], block: int) -> range:
    """The parameters, by their place in flat order, that have elements in a block."""
    begin = sum(blocks[:block])
    return _overlapped(gradient_ends(profile, unit), begin, begin + blocks[block])


def edge(profile: Profile, unit: int, element: int, step: int, apart: int, begin: int = 0) -> int:
    """Where to cut a unit near an element, ``apart`` from other cuts: behind the end of a parameter if one ends near, at a
    multiple of ``step`` behind ``begin``. What is beyond that end goes to the block before it, for its gradient comes earlier.
    """
    if not profile.units[unit].gradients or apart < 4 * step:
        return element
    near = min(gradient_ends(profile, unit), key=lambda end: abs(end - element))
    return begin - (begin - near) // step * step if abs(near - element) <= apart // 3 else element


def _overlapped(ends: Sequence[int], begin: int, end: int) -> range:
    return range(bisect.bisect_right(ends, begin), min(bisect.bisect_left(ends, end) + 1, len(ends)))


@lru_cache(maxsize=4096)
def _parts_of(ends: tuple[int, ...], parts: tuple[float, ...], blocks: tuple[int, ...]) -> tuple[float, ...]:
    out, begin = [], 0
    for size in blocks:
        own = _overlapped(ends, begin, begin + size)
        out.append(max(parts[own.start : own.stop]))
        begin += size
    return tuple(out)
