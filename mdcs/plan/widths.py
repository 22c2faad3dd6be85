"""Sections and element widths of blocks.

A block lies within one section of its unit. A message carries elements of one width, so parts are grouped by width.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache

from mdcs.profile.contents import Profile
from mdcs.profile.layout import Layout
from mdcs.profile.link import Kind


@lru_cache(maxsize=4096)
def sections_of(layout: Layout, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the section of each block of a unit."""
    if len(layout.sections) == 1:
        return (0,) * len(blocks)
    return tuple(layout.index(end - 1) for end in itertools.accumulate(blocks))


def width_of(profile: Profile, blocks: Sequence[tuple[int, ...]], kind: Kind, part: tuple[int, int]) -> int:
    """Return the bytes of an element of a (unit, block) pair on the wire, in a message of this kind."""
    unit, block = part
    layout = profile.layouts[unit]
    return layout.sections[sections_of(layout, blocks[unit])[block]].width(kind.is_gather)


def by_width(
    profile: Profile, blocks: Sequence[tuple[int, ...]], kind: Kind, parts: tuple[tuple[int, int], ...]
) -> Iterable[tuple[tuple[int, int], ...]]:
    """Return the parts grouped by element width. Each group fits into one message."""
    if not profile.is_mixed:
        return (parts,)
    found: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        found.setdefault(width_of(profile, blocks, kind, part), []).append(part)
    return [tuple(alike) for alike in found.values()]
