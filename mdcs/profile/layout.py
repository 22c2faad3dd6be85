"""Layout of a unit's flat buffer: elements of one type, padded so that the ranks can divide them at equal distances.

An elementwise optimizer does not mind where the cuts are. For one that needs whole parameters, parameters are ordered
by the rank that owns them, and every rank's share is padded to the largest.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple


@lru_cache(maxsize=64)
def itemsize(dtype: str) -> int:
    """Return the bytes of an element of a floating type by its name in torch. Raises ValueError for another."""
    match = re.match(r"b?float(\d+)(_|$)", dtype)
    if match is None:
        raise ValueError(f"a type must be floating, such as float32 or bfloat16, got {dtype!r}")
    return int(match[1]) // 8


@dataclass(frozen=True)
class WholeParameter:
    """A parameter that its optimizer updates as a whole, on one rank or on every rank.

    - ``numel``: elements, with padding (:func:`mdcs.sizes.aligned`). ``state``: bytes of its optimizer state.
    - ``scratch``: temporary bytes of its update. ``seconds``: time of its update.
    """

    numel: int
    state: int = 0
    scratch: int = 0
    seconds: float = 0.0


@lru_cache(maxsize=4096)
def assign_owners(sizes: tuple[int, ...], ranks: int) -> tuple[tuple[int, ...], int]:
    """Return the offset of each parameter, and the share of each rank (elements): contiguous, with whole parameters."""
    loads, offsets = [0] * ranks, [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):  # the largest first, to the rank of the least
        rank = loads.index(min(loads))
        offsets[i] = rank, loads[rank]
        loads[rank] += sizes[i]
    share = max(loads)
    return tuple([rank * share + offset for rank, offset in offsets]), share


@dataclass(frozen=True)
class Layout:
    """Elements and widths of a unit's flat buffer, for ``world`` ranks.

    - ``numel``: elements. Each parameter counts with its padding (:func:`mdcs.sizes.aligned`).
    - ``param_width``: bytes of a parameter element in compute.
    - ``grad_width``: bytes of a gradient element on the wire and in shards.
    - ``master_width``: bytes of an element of the copy that the optimizer updates. 0: the optimizer updates the
      parameter itself.
    - ``whole``: the parameters in flat order, where the optimizer needs whole ones; empty where it is elementwise.
    """

    numel: int
    world: int
    param_width: int
    grad_width: int
    master_width: int = 0
    whole: tuple[WholeParameter, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Return whether its parameters are updated as wholes. Such a unit is one block."""
        return bool(self.whole)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each whole parameter (elements)."""
        return assign_owners(tuple([p.numel for p in self.whole]), self.world)[0]

    @cached_property
    def elements(self) -> int:
        """Elements, padding included: a multiple of ``world``."""
        if not self.whole:
            return -(-self.numel // self.world) * self.world
        return self.world * assign_owners(tuple([p.numel for p in self.whole]), self.world)[1]

    def owned(self, parts: int) -> tuple[tuple[WholeParameter, ...], ...]:
        """Return the whole parameters that each of ``parts`` ranks updates."""
        share, out = self.elements // parts, [list[WholeParameter]() for _ in range(parts)]
        for p, offset in zip(self.whole, self.offsets, strict=True):
            out[offset // share].append(p)
        return tuple(map(tuple, out))

    @property
    def updated_width(self) -> int:
        """Bytes of an element of the copy that the optimizer updates."""
        return self.master_width or self.param_width

    def width(self, is_gather: bool) -> int:
        """Return the bytes of an element on the wire: parameters are gathered, gradients are reduced."""
        return self.param_width if is_gather else self.grad_width

    @cached_property
    def param_bytes(self) -> int:
        """Bytes of the full parameters, padding included."""
        return self.elements * self.param_width

    @cached_property
    def grad_bytes(self) -> int:
        """Bytes of the full gradient, padding included."""
        return self.elements * self.grad_width

    def ends(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the ends (elements) of consecutive parts of these lengths in the flat buffer, padding included."""
        return (*itertools.accumulate(lengths[:-1]), self.elements)

    def pieces(self, lengths: Sequence[int], part: slice) -> list[tuple[int, int, int]]:
        """Return (start, elements, number) of what a ``part`` of the flat buffer has of parts of these lengths."""
        return runs(self.ends(lengths), part)


def runs(ends: Sequence[int], part: slice) -> list[tuple[int, int, int]]:
    """Return (start, elements, number) of what a ``part`` of a flat buffer has of parts that end at ``ends``."""
    out, low = [], part.start
    for number in range(bisect.bisect_right(ends, low), len(ends)):
        if low >= part.stop:
            break
        high = min(ends[number], part.stop)
        out.append((low, high - low, number))
        low = high
    return out


def owned_part(offset: int, size: int, parts: int, rank: int) -> slice:
    """Return the part of a block that ``rank`` updates, in the flat buffer. ``offset``, ``size``: the block's."""
    start = offset + rank % parts * (size // parts)
    return slice(start, start + size // parts)


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
    """Return the cuts of a unit. ``ends``: of its segments (elements). ``parts``: number of ranks that share an update
    (:meth:`mdcs.plan.period.Strategy.parts`); ranks in the result are modulo ``parts``.
    """
    counts: Counter[int] = Counter()
    largest = []
    start = 0
    for size in blocks:
        inside = ends[bisect.bisect_right(ends, start) : bisect.bisect_left(ends, start + size)]
        lengths = {}  # of the runs of ranks that may have several
        for rank in {(end - start) // (size // parts) for end in inside}:
            lengths[rank] = [n for _, n, _ in runs(ends, owned_part(start, size, parts, rank))]
            counts[rank] += len(lengths[rank]) - 1
        whole = [size // parts] * (len(lengths) < parts)
        largest.append(max(itertools.chain(whole, *lengths.values())))
        start += size
    if parts == 1:
        return Cuts(counts[0], (), tuple(largest))
    return Cuts(0, tuple(sorted((+counts).items())), tuple(largest))
