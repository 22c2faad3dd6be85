"""Collectives that fully_shard calls instead of its own: the same messages or an all-to-all, with measured times."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.engines.base import Peer
from mdcs.profile.link import Kind
from mdcs.torch_compat import backward_pass

# torch 2.13 has new names, and warns about the old ones at every call.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Allocating:
    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Allocating):
    """The backend's own all-gather, with measured times."""

    def __init__(self, engine: Peer) -> None:
        self._engine = engine

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        kind = Kind.AG_F if backward_pass() == -1 else Kind.AG_B
        begin = perf_counter()
        work = all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if not async_op:
            self._engine.sent(kind, output_tensor.nbytes, begin, perf_counter(), waited=True)
            return None
        return _Timed(self._engine, kind, output_tensor.nbytes, begin, work)


class _Timed(dist.Work):
    """A gather in flight. Its end is the end of the transfer, which may come before the call of `wait`."""

    def __init__(self, engine: Peer, kind: Kind, size: int, begin: float, work: dist.Work) -> None:
        super().__init__()
        self._engine, self._work, self._told = engine, work, (kind, size, begin)
        self._ended: list[float] = []
        work.get_future().add_done_callback(lambda _: self._ended.append(perf_counter()))

    def wait(self, timeout: Any = None) -> bool:
        begin = perf_counter()
        done = self._work.wait()
        end = perf_counter()
        self._engine.seen.waits.append((begin, end))
        kind, size, started = self._told
        self._engine.sent(kind, size, started, min([end, *self._ended]), waited=False)
        return done


class ReduceScatter(_Allocating):
    def __init__(self, engine: Peer, run: Any) -> None:
        self._engine, self._run = engine, run

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        begin = perf_counter()
        self._run(output_tensor, input_tensor, op=op, group=group)
        self._engine.sent(Kind.RS, input_tensor.nbytes, begin, perf_counter(), waited=True)


def all_to_all(output: Tensor, whole: Tensor, *, op: Any, group: dist.ProcessGroup) -> None:
    """Reduce-scatter by all-to-all: a rank receives its part from all ranks, and sums the parts in the order of ranks.
    output: [n]; whole: [n · ranks]."""
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=group)
    torch.sum(parts.view(group.size(), -1), dim=0, out=output)
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())
