"""The algorithms of :mod:`mdcs.profile.algorithms` on a process group: each starts at once and continues when waited
for.

An algorithm is a generator: it starts some works, yields them, and is resumed when they are done. Steps after the first
are point-to-point sends under the message's own tag. Ranks may interleave the later steps of one message with the first
step of the next in any order; collectives of a process group would not allow this.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind
from mdcs.runtime.executor import Waitable
from mdcs.torch_compat import cpu_backend

Steps = Iterator[Sequence[Waitable]]

_TAGS = 1 << 16  # more than messages are ever in flight

# torch 2.13 renamed both; the old names warn at every call there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Running:
    """A collective in flight: its first step has started, :meth:`wait` runs the other steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._works = next(steps, [])

    def wait(self) -> None:
        """Wait until it is done. Raises the backend's RuntimeError when a peer is gone or a step times out."""
        while self._works:
            for work in self._works:
                work.wait()
            self._works = next(self._steps, [])


class Communicator:
    """The collectives of one process group (None: the default one). Every rank must call them in the same order.

    Buffers are flat, of a multiple of ``world`` elements; rank r's part is the r-th of ``world`` equal parts.
    ``received`` is scratch of :meth:`Collectives.buffer` elements, for algorithms that are not native. Communicators of
    one group whose messages are in flight together share ``tags``. ``synchronous``: NCCL's collectives run on the
    caller's stream, in its order, with no stream of their own and no events between (torch since 2.8).
    """

    def __init__(
        self, collectives: Collectives, group: dist.ProcessGroup | None, tags: Iterator[int] | None = None,
        synchronous: bool = False,
    ) -> None:  # fmt: skip
        self._async = not synchronous or collectives.backend == "gloo"
        self.collectives, self.group = collectives, group
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        if collectives.backend == "gloo":
            # Call the backend directly: torch.distributed's wrappers cost more than gloo needs for a small message.
            self._gloo: Any = cpu_backend(group)
        self._others = [(self.rank + k) % self.world for k in range(1, self.world)]  # each rank begins with another peer
        self._tags = itertools.count() if tags is None else tags

    def all_reduce(self, buffer: Tensor, received: Tensor | None) -> Running:
        """Sum ``buffer`` over ranks, in place."""
        if self.collectives.all_reduce == "ring":
            assert received is not None
            return Running(self._ring_all_reduce(buffer, received))
        if self.collectives.all_reduce == "direct":
            assert received is not None
            return Running(self._direct_all_reduce(buffer, received))
        if self.collectives.all_reduce == "reduce_broadcast":
            assert received is not None
            return Running(self._reduce_broadcast(buffer, received))
        return _one(dist.all_reduce(buffer, group=self.group, async_op=self._async))

    def reduce_scatter(self, buffer: Tensor, received: Tensor | None, out: Tensor) -> Running:
        """Write the sum over ranks of this rank's part to ``out``. Overwrites ``buffer``; ``out`` may be its part of
        it.

        With all_to_all ``received`` gets the summands, rank by rank, and the caller sums them.
        """
        if self.collectives.reduce_scatter == "ring":
            assert received is not None
            return Running(self._ring_reduce_scatter(buffer, received, out, self._tag()))
        if self.collectives.reduce_scatter == "direct":
            assert received is not None
            return Running(self._direct_reduce_scatter(buffer, received, out, self._tag()))
        if self.collectives.reduce_scatter == "all_to_all":
            assert received is not None
            return _one(self._gloo.alltoall_base(received, buffer, [], []))
        if self.collectives.backend == "gloo":
            return Running(self._all_reduce_and_keep(buffer, out))
        return _one(_reduce_scatter(out, buffer, group=self.group, async_op=self._async))

    def all_gather(self, buffer: Tensor) -> Running:
        """Send every rank's part of ``buffer`` to all, in place."""
        parts = buffer.chunk(self.world)
        if self.collectives.all_gather == "ring":
            return Running(self._ring_all_gather(parts, self._tag()))
        if self.collectives.all_gather == "direct":
            return Running(self._direct_all_gather(parts, self._tag()))
        if self.collectives.all_gather == "broadcast":
            return _one(*(self._gloo.broadcast(p, r) for r, p in enumerate(parts)))
        return _one(_all_gather(buffer, parts[self.rank], group=self.group, async_op=self._async))

    def _all_reduce_and_keep(self, buffer: Tensor, out: Tensor) -> Steps:
        """Reduce-scatter by an all-reduce: gloo's own reduce-scatter makes a copy that outlives the call."""
        yield [_work(dist.all_reduce(buffer, group=self.group, async_op=True))]
        out.copy_(buffer.chunk(self.world)[self.rank])

    # -- from point to point ------------------------------------------------------------------------------------

    # Post receives before sends. gloo announces a posted receive on the same connection as its own data: behind a send
    # the announcement would wait, and two ranks would send to each other one after the other.

    def _ring_all_reduce(self, buffer: Tensor, received: Tensor) -> Steps:
        tag, parts = self._tag(), buffer.chunk(self.world)
        yield from self._ring_reduce_scatter(buffer, received, parts[self.rank], tag)
        yield from self._ring_all_gather(parts, tag)

    def _ring_reduce_scatter(self, buffer: Tensor, received: Tensor, out: Tensor, tag: int) -> Steps:
        """Send each part once around the ring, from the rank behind its owner to the owner, summing on the way."""
        parts = buffer.chunk(self.world)
        for k in range(1, self.world):
            sent, arriving = parts[(self.rank - k) % self.world], parts[(self.rank - k - 1) % self.world]
            yield [self._receive(received, self.rank - 1, tag), self._send(sent, self.rank + 1, tag)]
            torch.add(arriving, received, out=arriving if k < self.world - 1 else out)

    def _ring_all_gather(self, parts: tuple[Tensor, ...], tag: int) -> Steps:
        for k in range(self.world - 1):
            sent, arriving = parts[(self.rank - k) % self.world], parts[(self.rank - k - 1) % self.world]
            yield [self._receive(arriving, self.rank - 1, tag), self._send(sent, self.rank + 1, tag)]

    def _direct_all_reduce(self, buffer: Tensor, received: Tensor) -> Steps:
        tag, parts = self._tag(), buffer.chunk(self.world)
        yield from self._direct_reduce_scatter(buffer, received, parts[self.rank], tag)
        yield from self._direct_all_gather(parts, tag)

    def _direct_reduce_scatter(self, buffer: Tensor, received: Tensor, out: Tensor, tag: int) -> Steps:
        parts = list(buffer.chunk(self.world))
        arriving = dict(zip(self._others, received.chunk(len(self._others)), strict=True))
        yield [
            *(self._receive(part, rank, tag) for rank, part in arriving.items()),
            *(self._send(parts[rank], rank, tag) for rank in self._others),
        ]
        # Summed in rank order on every rank: the result does not depend on who arrives first.
        first, *summands, last = (arriving.get(rank, parts[rank]) for rank in range(self.world))
        for summand in summands:
            first += summand
        torch.add(first, last, out=out)

    def _direct_all_gather(self, parts: tuple[Tensor, ...], tag: int) -> Steps:
        yield [
            *(self._receive(parts[rank], rank, tag) for rank in self._others),
            *(self._send(parts[self.rank], rank, tag) for rank in self._others),
        ]

    def _reduce_broadcast(self, buffer: Tensor, received: Tensor) -> Steps:
        """Reduce up a binomial tree with rank 0 at its root, then broadcast down."""
        tag, rank = self._tag(), self.rank
        levels = [1 << i for i in range((self.world - 1).bit_length())]
        for d in levels:
            if rank % (2 * d) == d:
                yield [self._send(buffer, rank - d, tag)]
            elif rank % (2 * d) == 0 and rank + d < self.world:
                yield [self._receive(received, rank + d, tag)]
                buffer += received
        for d in reversed(levels):
            if rank % (2 * d) == d:
                yield [self._receive(buffer, rank - d, tag)]
            elif rank % (2 * d) == 0 and rank + d < self.world:
                yield [self._send(buffer, rank + d, tag)]

    def _tag(self) -> int:
        return next(self._tags) % _TAGS

    def _send(self, tensor: Tensor, to: int, tag: int) -> dist.Work:
        work: dist.Work = self._gloo.send([tensor], to % self.world, tag)
        return work

    def _receive(self, tensor: Tensor, source: int, tag: int) -> dist.Work:
        work: dist.Work = self._gloo.recv([tensor], source % self.world, tag)
        return work


class NodeCommunicator:
    """Collectives of strategies that shard within a node: ``inside`` is this node, ``across`` the same shard of all
    nodes.

    ``received`` is scratch for both, one after the other (:meth:`Collectives.buffer_by_node`).
    """

    def __init__(self, inside: Communicator, across: Communicator) -> None:
        self._inside, self._across = inside, across
        self.levels = inside.world, across.world

    def all_gather(self, buffer: Tensor) -> Running:
        """Send the parts of the node's ranks to all of them, in place."""
        return self._inside.all_gather(buffer)

    def reduce_scatter(self, buffer: Tensor, received: Tensor | None, out: Tensor) -> Running:
        """Write the sum over the ranks of all nodes of this rank's part to ``out``. Overwrites ``buffer``."""
        return Running(self._reduce(buffer, received, out))

    def _reduce(self, buffer: Tensor, received: Tensor | None, out: Tensor) -> Steps:
        inside, across = self._inside, self._across
        first = _head(received, inside.collectives.buffer(Kind.RS, buffer.numel(), inside.world))
        yield [inside.reduce_scatter(buffer, first, out)]
        if first is not None and inside.collectives.sums_afterwards(Kind.RS):
            sum_rows(first.view(inside.world, -1), out)
        second = _head(received, across.collectives.buffer(Kind.AR, out.numel(), across.world))
        yield [across.all_reduce(out, second)]


def sum_rows(rows: Tensor, out: Tensor) -> None:
    """Sum ``rows`` [ranks, elements] into ``out``, in row order: the result does not depend on arrival order."""
    first, second, *others = rows
    torch.add(first, second, out=out)
    for row in others:
        out += row


def _head(buffer: Tensor | None, elements: int) -> Tensor | None:
    return None if buffer is None else buffer[:elements]


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return gloo or nccl, whichever carries tensors of ``device``; gloo for a single process without a group."""
    if not dist.is_initialized():
        return "gloo"
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return "gloo" if by_device.get(device.type, dist.get_backend(group)) == "gloo" else "nccl"


def _one(*works: dist.Work | None) -> Running:
    return Running(iter([[work for work in works if work is not None]]))


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "asynchronous collectives return their work"
    return work
