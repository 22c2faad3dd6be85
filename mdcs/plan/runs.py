"""Runs: the contiguous pieces of a block that one rank updates.

Boundaries of segments cut a rank's part of a block. The optimizer sees each run as one tensor.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from mdcs.plan.plan import Plan
from mdcs.plan.strategy import Strategy
from mdcs.profile.schema import Profile


def runs(plan: Plan, unit: int, block: int, rank: int) -> list[tuple[int, int, int]]:
    """Return :func:`pieces_of` a block of a plan."""
    return pieces_of(plan.profile, unit, plan.strategies[unit], plan.blocks[unit], block, rank)


def pieces_of(
    profile: Profile, unit: int, strategy: Strategy, blocks: tuple[int, ...], block: int, rank: int
) -> list[tuple[int, int, int]]:
    """Return (start, length, segment) of each piece of a block that ``rank`` updates, in flat elements.

    With dp every rank updates the whole block, otherwise its share. Padding belongs to the last segment.
    """
    parts = strategy.parts(profile)
    size = blocks[block] // parts
    start = sum(blocks[:block]) + rank % parts * size
    pieces, end = [], 0
    for s, ends in enumerate(profile.layouts[unit].ends(profile.units[unit].segments)):
        begin, end = end, ends
        low, high = max(begin, start), min(end, start + size)
        if low < high:
            pieces.append((low, high - low, s))
    return pieces


class Cuts(NamedTuple):
    """Extra runs of a unit's updates, where segment boundaries cut the part of a rank. A block without cuts is one run.

    - ``everywhere``: cuts that every rank has.
    - ``on_rank``: (rank, further cuts) of the ranks that have some.
    - ``largest``: for each block, the longest run of any rank (elements).
    """

    everywhere: int
    on_rank: tuple[tuple[int, int], ...]
    largest: tuple[int, ...]


@lru_cache(maxsize=4096)
def cuts(ends: tuple[int, ...], blocks: tuple[int, ...], parts: int) -> Cuts:
    """Return the cuts of a unit.

    - ``ends``: ends of its segments (elements).
    - ``parts``: number of ranks that share an update (:meth:`Strategy.parts`). Ranks in the result are modulo
      ``parts``.
    """
    counts: Counter[int] = Counter()
    largest = []
    start = 0
    for size in blocks:
        part = size // parts
        inside = {end - start for end in ends if start < end < start + size and (end - start) % part}
        counts.update(offset // part for offset in inside)
        cut_ranks = {offset // part for offset in inside}
        if len(cut_ranks) < parts:
            largest.append(part)
        else:
            edges = sorted({*inside, *range(0, size + 1, part)})
            largest.append(max(b - a for a, b in itertools.pairwise(edges)))
        start += size
    if parts == 1:
        return Cuts(counts[0], (), tuple(largest))
    return Cuts(0, tuple(sorted(counts.items())), tuple(largest))
