"""Layout of a unit's flat buffer: sections of one type each, padded so that the ranks can divide them.

Ranks divide a section at equal distances. An elementwise optimizer does not mind where the cuts are. For an optimizer that
needs whole parameters, parameters are ordered by the rank that owns them, and every rank's share is padded to the largest.
"""

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
class WholeParameter:
    """A parameter that its optimizer updates as a whole, on one rank or on every rank.

    - ``numel``: elements, with padding (:func:`mdcs.sizes.aligned`).
    - ``state``: bytes of its optimizer state.
    - ``scratch``: temporary bytes of its update.
    - ``seconds``: time of its update.
    """

    numel: int
    state: int = 0
    scratch: int = 0
    seconds: float = 0.0


@lru_cache(maxsize=4096)
def assign_owners(sizes: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], int]:
    """Return the offset of each parameter, and the share of each rank: shares are contiguous, and no parameter crosses one.

    The largest parameter first, each to the rank that has the least. All numbers are in elements.
    """
    loads, offsets = [0] * ranks, [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        rank = loads.index(min(loads))
        offsets[i] = rank, loads[rank]
        loads[rank] += sizes[i]
    share = max(loads)
    return tuple([rank * share + offset for rank, offset in offsets]), share


@dataclass(frozen=True)
class Section:
    """Consecutive elements of a unit that have one type and one optimizer, without the padding at its end.

    - ``numel``: elements. Each parameter counts with its padding (:func:`mdcs.sizes.aligned`).
    - ``param_bytes``: bytes of a parameter element in compute.
    - ``grad_bytes``: bytes of a gradient element on the wire and in shards.
    - ``master_bytes``: bytes of an element of the copy that the optimizer updates. 0: the optimizer updates the
      parameter itself.
    - ``optimizer``: index into :attr:`mdcs.profile.schema.Profile.optimizers`.
    - ``parameters``: the parameters in flat order, where the optimizer needs whole ones; empty where it is elementwise.

    Raises ValueError for numbers out of range, and for ``parameters`` with other elements.
    """

    numel: int
    param_bytes: int
    grad_bytes: int
    master_bytes: int = 0
    optimizer: int = 0
    parameters: tuple[WholeParameter, ...] = ()

    def __post_init__(self) -> None:
        if min(self.numel, self.param_bytes, self.grad_bytes) < 1 or min(self.master_bytes, self.optimizer) < 0:
            raise ValueError(f"a section must have elements and bytes, got {self}")
        if self.parameters and sum(p.numel for p in self.parameters) != self.numel:
            raise ValueError(f"a section's parameters must have its {self.numel} elements, got {self.parameters}")

    @property
    def is_whole(self) -> bool:
        """Whether its parameters are updated as wholes. Such a section is one block."""
        return bool(self.parameters)

    def offsets(self, world: int) -> tuple[int, ...]:
        """Return the offset of each whole parameter in the section (elements)."""
        return assign_owners(tuple([p.numel for p in self.parameters]), world)[0]

    def size(self, world: int) -> int:
        """Return the elements, padding included."""
        if not self.parameters:
            return pad(self.numel, world)
        return world * assign_owners(tuple([p.numel for p in self.parameters]), world)[1]

    def owned(self, world: int, parts: int) -> tuple[tuple[WholeParameter, ...], ...]:
        """Return the whole parameters that each of ``parts`` ranks updates, of a layout for ``world`` ranks."""
        share, out = self.size(world) // parts, [list[WholeParameter]() for _ in range(parts)]
        for p, offset in zip(self.parameters, self.offsets(world), strict=True):
            out[offset // share].append(p)
        return tuple(map(tuple, out))

    @property
    def updated_bytes(self) -> int:
        """Bytes of an element of the copy that the optimizer updates."""
        return self.master_bytes or self.param_bytes

    def width(self, is_gather: bool) -> int:
        """Return the bytes of an element on the wire: parameters are gathered, gradients are reduced."""
        return self.param_bytes if is_gather else self.grad_bytes


@dataclass(frozen=True)
class Layout:
    """The sections of a unit, one after the other, with padding: each is a multiple of ``world``."""

    sections: tuple[Section, ...]
    world: int

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each section, padding included."""
        return tuple(s.size(self.world) for s in self.sections)

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
