"""When the gradients of a unit become ready within its last backward slot, mostly from the last parameter to the first.

The profile says when (:attr:`mdcs.profile.schema.Unit.gradients`). Reductions may leave early
(:attr:`mdcs.plan.schedule.Schedule.ready`), and cuts between blocks move to the ends of parameters.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache

from mdcs.profile.schema import Profile


def block_ready_fractions(profile: Profile, unit: int, blocks: tuple[int, ...]) -> tuple[float, ...]:
    """Return for each block the fraction of the unit's last backward slot after which all its gradients are ready."""
    gradients = profile.units[unit].gradients
    if not gradients:
        return (1.0,) * len(blocks)
    return _parts_of(gradient_ends(profile, unit), tuple(part for _, part in gradients), blocks)


def blocks_by_readiness(profile: Profile, unit: int, blocks: tuple[int, ...]) -> list[int]:
    """Return the blocks of a unit in the order in which their gradients become ready."""
    return sorted(range(len(blocks)), key=block_ready_fractions(profile, unit, blocks).__getitem__)


def gradient_ends(profile: Profile, unit: int) -> tuple[int, ...]:
    """Return where each parameter ends in the unit's flat buffer (elements, padding included).

    Empty if the profile does not say when gradients become ready.
    """
    gradients = profile.units[unit].gradients
    return profile.layouts[unit].ends([n for n, _ in gradients]) if gradients else ()


def ready_fraction_in_slot(profile: Profile, unit: int) -> float:
    """Return the fraction of a unit's gradients that are ready before its last backward slot ends."""
    layout, gradients = profile.layouts[unit], profile.units[unit].gradients
    begin, within = 0, 0
    for (_, part), end in zip(gradients, gradient_ends(profile, unit), strict=True):
        if part < 1:
            within += end - begin
        begin = end
    return within / layout.elements


def parameters_in_block(profile: Profile, unit: int, blocks: tuple[int, ...], block: int) -> range:
    """Return the parameters that have elements in a block, as indices in flat order."""
    begin = sum(blocks[:block])
    return _overlapped(gradient_ends(profile, unit), begin, begin + blocks[block])


def snap_to_parameter_boundary(profile: Profile, unit: int, element: int, step: int, apart: int) -> int:
    """Return where to cut a unit near ``element``, as a flat element offset. Prefers the end of a parameter.

    If a parameter ends within ``apart // 3`` elements, the result is that end, rounded up to a multiple of ``step``.
    Otherwise the result is ``element``. ``apart``: distance to the other cuts. Rounding up
    moves the first elements of the next parameter into the block before the cut. This delays nothing: their gradient is
    ready earlier.
    """
    if not profile.units[unit].gradients or apart < 4 * step:
        return element
    near = min(gradient_ends(profile, unit), key=lambda end: abs(end - element))
    return -(-near // step) * step if abs(near - element) <= apart // 3 else element


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
