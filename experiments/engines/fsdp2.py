"""torch's fully_shard (FSDP2), on every block and on what the blocks leave over.

On CPU its collectives are timed by passing through here: fully_shard takes other ones of its user. By itself it waits for
each at once there; with `engine.prefetch` gathers are in flight while blocks before them compute. The reduce-scatter
is the backend's own, or an all-to-all and a local sum, which sends half of what gloo's own does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from experiments.config.schema import Config, ConfigError
from experiments.engines.base import Engine, Peer, Trained
from mdcs.profile.algorithms import Collectives
from mdcs.profile.link import Kind

# torch 2.13 has new names, and warns of the old ones at every call.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def prepare(config: Config, workload: Trained) -> Engine:
    return Fsdp2(config, workload)


class Fsdp2(Peer):
    def __init__(self, config: Config, workload: Trained) -> None:
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise ConfigError("engine.name", f"fsdp2 needs a newer torch: in {torch.__version__} it takes no collectives")
        engine, blocks = config.engine, workload.blocks()
        mesh = init_device_mesh(workload.device.type, (workload.world,))
        reshard = {"always": True, "never": False, "group": engine.reshard_group}[engine.reshard or "always"]
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        root: Any = fully_shard(workload.model, mesh=mesh, reshard_after_forward=False)  # its backward comes at once
        super().__init__(config, workload, root, workload.optimizer_of(root))
        self.shows_waits = self.shows_messages = workload.device.type == "cpu"
        self._root, self._in_flight, self._lock = root, 0, threading.Condition()
        self._tune(blocks, config)

    def _tune(self, blocks: list[nn.Module], config: Config) -> None:
        """Prefetching and collectives, as the config says."""
        ahead = config.engine.prefetch
        if ahead is not None:
            _prefetch([self._root, *blocks], ahead)
            self._root._set_unshard_async_op(self.workload.device.type == "cpu")  # where there is no stream to wait
        if self.workload.world == 1:
            return
        modules: list[Any] = [self._root, *blocks]
        own = config.engine.reduce_scatter == "own"
        if not own and self.collectives.backend == "gloo":
            self.collectives = Collectives(all_gather="native", reduce_scatter="all_to_all")
        elif self.collectives.backend == "gloo":
            self.collectives = Collectives(all_gather="native", reduce_scatter="native")
        for module in modules:
            if self.shows_messages:
                module.set_custom_all_gather(_Gather(self))
            if self.shows_messages or not own:
                module.set_custom_reduce_scatter(_ReduceScatter(self, _reduce_scatter if own else _all_to_all))

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        return nullcontext()

    def clip(self, norm: float) -> Tensor:
        total: Any = super().clip(norm)
        whole: Tensor = total.full_tensor()
        return whole

    # ---- what the collectives tell

    def sent(self, kind: Kind, size: int, begin: float, end: float, *, waited: bool) -> None:
        """``size`` is of the whole message."""
        self.seen.message(kind, self.collectives.sent(kind, size, self.workload.world), (begin, end))
        if waited:
            self.seen.waits.append((begin, end))


class _Allocating:
    def allocate(self, size: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating):
    """The backend's own all-gather, timed."""

    def __init__(self, engine: Fsdp2) -> None:
        self._engine = engine

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        kind = Kind.AG_F if torch._C._current_graph_task_id() == -1 else Kind.AG_B
        begin = perf_counter()
        work = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        if not async_op:
            self._engine.sent(kind, output_tensor.nbytes, begin, perf_counter(), waited=True)
            return None
        return _Timed(self._engine, kind, output_tensor.nbytes, begin, work)


class _Timed(dist.Work):
    """A gather in flight: it ends when it is done, which may be before it is waited for."""

    def __init__(self, engine: Fsdp2, kind: Kind, size: int, begin: float, work: dist.Work) -> None:
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


class _ReduceScatter(_Allocating):
    def __init__(self, engine: Fsdp2, run: Any) -> None:
        self._engine, self._run = engine, run

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        begin = perf_counter()
        self._run(output_tensor, input_tensor, op=op, group=group)
        self._engine.sent(Kind.RS, input_tensor.nbytes, begin, perf_counter(), waited=True)


def _all_to_all(output: Tensor, whole: Tensor, *, op: Any, group: dist.ProcessGroup) -> None:
    """A reduce-scatter: every rank gets its part from all ranks, and sums in the order of ranks."""
    parts = torch.empty_like(whole)
    dist.all_to_all_single(parts, whole, group=group)
    torch.sum(parts.view(group.size(), -1), dim=0, out=output)
    if op == dist.ReduceOp.AVG:
        output.div_(group.size())


def _prefetch(modules: list[Any], ahead: int) -> None:
    """Each gathers the ``ahead`` next ones before it computes: in forward those behind it, in backward those before it."""
    root, *blocks = modules
    for i, module in enumerate(modules):
        if following := modules[i + 1 : i + 1 + ahead]:
            module.set_modules_to_forward_prefetch(following)
        before = blocks[::-1][:ahead] if module is root else blocks[max(0, i - 1 - ahead) : i - 1][::-1]
        if before:
            module.set_modules_to_backward_prefetch(before)
