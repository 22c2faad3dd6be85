"""The collectives of messages on a process group: each starts at once and continues when waited for.

The native family is the backend's own collectives; the other is rings of sends to the next rank, on gloo. Each is a
generator: it starts some works, yields them, and is resumed when they are done.

All steps of a ring are point-to-point sends under the message's own tag. Ranks may interleave the later steps of one
message with the first step of the next in any order; collectives of a process group would not allow this.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.link import Collectives, Kind
from mdcs.runtime.executor import Waitable
from mdcs.torch_compat import cpu_backend, is_profiled, unrecorded

# torch 2.13 renamed both; the old names warn at every call there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_TAGS = 1 << 16  # more than messages are ever in flight


class PendingCollective:
    """A collective in flight: its first step has started, :meth:`wait` runs the other steps.

    ``steps``: generator that starts some works, yields them, and is resumed when they are done.
    """

    def __init__(self, steps: Iterator[Sequence[Waitable]]) -> None:
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

    Buffers are flat [world · part]; rank r's part is the r-th. Communicators of one group whose messages are in flight
    together share ``tags``. ``synchronous``: NCCL's collectives run on the caller's stream, in its order, with no
    stream of their own and no events between (torch since 2.8).
    """

    def __init__(
        self, collectives: Collectives, group: dist.ProcessGroup | None, tags: Iterator[int] | None = None,
        synchronous: bool = False,
    ) -> None:  # fmt: skip
        self.collectives, self.group = collectives, group
        self.world = dist.get_world_size(group)
        is_ring = collectives.algorithm == "ring"
        self._is_gloo = collectives.backend == "gloo"
        self._algorithm = Ring(group, tags) if is_ring else _Native(group, collectives.backend, synchronous)

    def scratch(self, kind: Kind, elements: int) -> int:
        """Return the elements of scratch that :meth:`launch` needs; native algorithms allocate their own."""
        return 0 if self.collectives.algorithm == "native" else self.collectives.buffer(kind, elements, self.world)

    def launch(
        self, kind: Kind, buffer: Tensor, scratch: Tensor | None = None, out: Tensor | None = None
    ) -> PendingCollective:
        """Start the collective of a message of this kind.

        - AR: sum ``buffer`` over ranks, in place.
        - RS: write the sum over ranks of this rank's part to ``out`` [part]. Overwrites ``buffer``; ``out`` may be a
          part of it.
        - AG_F, AG_B: send every rank's part of ``buffer`` to all, in place.
        """
        if kind.is_gather:
            steps = self._algorithm.all_gather(buffer)
        elif kind is Kind.AR:
            steps = self._algorithm.all_reduce(buffer, scratch)
        else:
            assert out is not None, "a reduce-scatter needs a place for its result"
            steps = self._algorithm.reduce_scatter(buffer, scratch, out)
        # A message may be in flight when the profiler stops: gloo's ranges must not be open then.
        with unrecorded() if self._is_gloo and is_profiled() else contextlib.nullcontext():
            return PendingCollective(steps)


class _Native:
    """The backend's own collectives, as generators of works."""

    def __init__(self, group: dist.ProcessGroup | None, backend: str, synchronous: bool) -> None:
        self._group, self._is_gloo = group, backend == "gloo"
        self._async = not synchronous or self._is_gloo
        self._world, self._rank = dist.get_world_size(group), dist.get_rank(group)

    def all_reduce(self, buffer: Tensor, scratch: Tensor | None) -> Iterator[Sequence[Waitable]]:
        yield _works(dist.all_reduce(buffer, group=self._group, async_op=self._async))

    def reduce_scatter(self, buffer: Tensor, scratch: Tensor | None, out: Tensor) -> Iterator[Sequence[Waitable]]:
        if self._is_gloo:  # by an all-reduce: gloo's own reduce-scatter makes a copy that outlives the call
            yield from self.all_reduce(buffer, scratch)
            out.copy_(buffer.chunk(self._world)[self._rank])
        else:
            yield _works(_reduce_scatter(out, buffer, group=self._group, async_op=self._async))

    def all_gather(self, buffer: Tensor) -> Iterator[Sequence[Waitable]]:
        part = buffer.chunk(self._world)[self._rank]
        yield _works(_all_gather(buffer, part, group=self._group, async_op=self._async))


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
        """Sum ``buffer`` [flat] over ranks, in place: a reduce-scatter, then an all-gather."""
        tag, parts = next(self._tags) % _TAGS, buffer.chunk(self.world)
        yield from self._reduce_scatter(parts, scratch, parts[self.rank], tag)
        yield from self._all_gather(parts, tag)

    def reduce_scatter(self, buffer: Tensor, scratch: Tensor | None, out: Tensor) -> Iterator[Sequence[Waitable]]:
        """Write the sum over ranks of this rank's part to ``out`` [part]. Overwrites ``buffer``."""
        return self._reduce_scatter(buffer.chunk(self.world), scratch, out, next(self._tags) % _TAGS)

    def all_gather(self, buffer: Tensor) -> Iterator[Sequence[Waitable]]:
        """Send every rank's part of ``buffer`` [flat] to all, in place."""
        return self._all_gather(buffer.chunk(self.world), next(self._tags) % _TAGS)

    # Both post a receive before the send. gloo announces a posted receive on the same connection as its own data:
    # behind a send the announcement would wait, and two ranks would send to each other one after the other.

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


class NodeCommunicator:
    """Collectives of strategies that shard within a node: ``inside`` is this node, ``across`` the same shard of all
    nodes.
    """

    def __init__(self, inside: Communicator, across: Communicator) -> None:
        self._inside, self._across = inside, across
        self.world = inside.world

    def scratch(self, kind: Kind, elements: int) -> int:
        """Return the elements of the scratch that :meth:`launch` needs: both reductions of RS_N use it in turn."""
        inside = self._inside.scratch(kind.plain, elements)
        return inside if kind.is_gather else max(inside, self._across.scratch(Kind.AR, elements // self.world))

    def launch(
        self, kind: Kind, buffer: Tensor, scratch: Tensor | None = None, out: Tensor | None = None
    ) -> PendingCollective:
        """Start the collective of a message of this kind, with tensors as in :meth:`Communicator.launch` [flat].

        - RS_N: reduce-scatter within the node, then all-reduce of ``out`` across nodes.
        - AG_F_N, AG_B_N: all-gather within the node.
        """
        if kind.is_gather:
            return self._inside.launch(kind.plain, buffer)
        assert out is not None, "a reduce-scatter needs a place for its result"
        return PendingCollective(self._reduce(buffer, scratch, out))

    def _reduce(self, buffer: Tensor, scratch: Tensor | None, out: Tensor) -> Iterator[Sequence[Waitable]]:
        for communicator, kind, tensor in (self._inside, Kind.RS, buffer), (self._across, Kind.AR, out):
            part = None if scratch is None else scratch[: communicator.scratch(kind, tensor.numel())]
            yield [communicator.launch(kind, tensor, part, out)]


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Return gloo or nccl, whichever carries tensors of ``device``; gloo for a single process without a group."""
    if not dist.is_initialized():
        return "gloo"
    by_device = dict(pair.split(":") for pair in dist.get_backend_config(group).split(",") if ":" in pair)
    return "gloo" if by_device.get(device.type, dist.get_backend(group)) == "gloo" else "nccl"


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]  # a synchronous collective has none
