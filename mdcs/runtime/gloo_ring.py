"""Ring collectives on gloo, made of sends to the next rank.

Each collective is a generator: it starts some works, yields them, and is resumed when they are done. All steps are
point-to-point sends under the message's own tag. Ranks may interleave the later steps of one message with the first
step of the next in any order; collectives of a process group would not allow this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.runtime.executor import Waitable
from mdcs.torch_compat import cpu_backend

_TAGS = 1 << 16  # more than messages are ever in flight


class Ring:
    """Rings over one process group (None: the default one).

    Buffers are flat [world · part]; rank r's part is the r-th. ``scratch`` is [part]. Rings of one group whose messages
    are in flight together share ``tags``.
    """

    def __init__(self, group: dist.ProcessGroup | None, tags: Iterator[int] | None = None) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # Call the backend directly: torch.distributed's wrappers cost more than gloo needs for a small message.
        self._gloo = cpu_backend(group)
        self._tags = itertools.count() if tags is None else tags

    def all_reduce(self, buffer: Tensor, scratch: Tensor | None) -> Iterator[Sequence[Waitable]]:
        """Sum ``buffer`` over ranks, in place: a reduce-scatter, then an all-gather."""
        tag, parts = next(self._tags) % _TAGS, buffer.chunk(self.world)
        yield from self._reduce_scatter(parts, scratch, parts[self.rank], tag)
        yield from self._all_gather(parts, tag)

    def reduce_scatter(self, buffer: Tensor, scratch: Tensor | None, out: Tensor) -> Iterator[Sequence[Waitable]]:
        """Write the sum over ranks of this rank's part to ``out`` [part]. Overwrites ``buffer``."""
        return self._reduce_scatter(buffer.chunk(self.world), scratch, out, next(self._tags) % _TAGS)

    def all_gather(self, buffer: Tensor) -> Iterator[Sequence[Waitable]]:
        """Send every rank's part of ``buffer`` to all, in place."""
        return self._all_gather(buffer.chunk(self.world), next(self._tags) % _TAGS)

    # Both post a receive before the send. gloo announces a posted receive on the same connection as its own data: behind
    # a send the announcement would wait, and two ranks would send to each other one after the other.

    def _reduce_scatter(
        self, parts: Sequence[Tensor], scratch: Tensor | None, out: Tensor, tag: int
    ) -> Iterator[Sequence[Waitable]]:
        """Send each part once around the ring, from the rank behind its owner to the owner, and sum on the way."""
        assert scratch is not None, "a ring needs scratch for a part"
        for k in range(1, self.world):
            sent, arriving = parts[(self.rank - k) % self.world], parts[(self.rank - k - 1) % self.world]
            yield [self._receive(scratch, tag), self._send(sent, tag)]
            torch.add(arriving, scratch, out=arriving if k < self.world - 1 else out)

    def _all_gather(self, parts: Sequence[Tensor], tag: int) -> Iterator[Sequence[Waitable]]:
        for k in range(self.world - 1):
            sent, arriving = parts[(self.rank - k) % self.world], parts[(self.rank - k - 1) % self.world]
            yield [self._receive(arriving, tag), self._send(sent, tag)]

    def _send(self, tensor: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._gloo.send([tensor], (self.rank + 1) % self.world, tag)
        return work

    def _receive(self, tensor: Tensor, tag: int) -> dist.Work:
        work: dist.Work = self._gloo.recv([tensor], (self.rank - 1) % self.world, tag)
        return work
