"""Layout of a unit's flat buffer: sections of one type each, padded so that the ranks can divide them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


def pad(numel: int, world: int) -> int:
    """Return ``numel`` rounded up to a multiple of ``world`` (elements)."""
    return -(-numel // world) * world


@dataclass(frozen=True)
class Section:
    """Consecutive elements of a unit that have one type, without the padding at its end.

    - ``numel``: elements. Each parameter counts with its padding (:func:`mdcs.sizes.aligned`).
    - ``param_bytes``: bytes of a parameter element in compute.
    - ``grad_bytes``: bytes of a gradient element on the wire and in shards.
    - ``master_bytes``: bytes of an element of the copy that the optimizer updates. 0: the optimizer updates the
      parameter itself.

    Raises ValueError for numbers out of range.
    """

    numel: int
    param_bytes: int
    grad_bytes: int
    master_bytes: int = 0

    def __post_init__(self) -> None:
        if min(self.numel, self.param_bytes, self.grad_bytes) < 1 or self.master_bytes < 0:
            raise ValueError(f"a section must have elements and bytes, got {self}")

    @property
    def updated_bytes(self) -> int:
        """Bytes of an element of the copy that the optimizer updates."""
        return self.master_bytes or self.param_bytes

    def width(self, is_gather: bool) -> int:
        """Return the bytes of an element on the wire: parameters are gathered, gradients are reduced."""
        return self.param_bytes if is_gather else self.grad_bytes


@dataclass(frozen=True)
class Layout:
    """The sections of a unit, one after the other. Each is padded at its end to a multiple of ``world``."""

    sections: tuple[Section, ...]
    world: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each section, padding included."""
        return tuple(pad(s.numel, self.world) for s in self.sections)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """End of each section, in elements from the start of the flat buffer."""
        return tuple(itertools.accumulate(self.sizes))

    @cached_property
    def elements(self) -> int:
        """Elements of all sections, padding included."""
        return self.ends[-1]

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of the full parameters, padding included."""
        return sum(size * s.param_bytes for s, size in zip(self.sections, self.sizes, strict=True))

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of the full gradient, padding included."""
        return sum(size * s.grad_bytes for s, size in zip(self.sections, self.sizes, strict=True))

    def index(self, element: int) -> int:
        """Return the index of the section that contains an element."""
        return bisect.bisect_right(self.ends, element)

    def segment_ends(self, segments: Sequence[int]) -> tuple[int, ...]:
        """Return where each segment ends in the flat buffer (elements), given the lengths of the segments.

        Padding belongs to the last segment of its section.
        """
        out, shift, counted = [], 0, 0
        sections = iter(zip(itertools.accumulate(s.numel for s in self.sections), self.ends, strict=True))
        last, end = next(sections)
        for length in segments:
            counted += length
            out.append(end if counted == last else counted + shift)
            if counted == last:
                shift = end - last
                last, end = next(sections, (last, end))
        return tuple(out)


@lru_cache(maxsize=4096)
def sections_of(layout: Layout, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of the section of each block of a unit: a block lies within one section."""
    if len(layout.sections) == 1:
        return (0,) * len(blocks)
    return tuple(layout.index(end - 1) for end in itertools.accumulate(blocks))
