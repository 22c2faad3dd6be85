"""FairScale: ShardedDataParallel with OSS, where parameters are whole, and FullyShardedDataParallel, for CUDA alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, EngineOptions
from experiments.engines.base import Engine, Peer, Seen, Trained
from mdcs.options import option
from mdcs.plan.cost import StepTimes
from mdcs.sizes import MIB
from mdcs.telemetry.timeline import Span

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Fairscale(EngineOptions):
    name = "fairscale"
    bucket_mib: float = option(32.0, "size of a bucket of gradients, MiB", above=0)

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return FairscaleEngine(self, config, workload)


class FairscaleEngine(Peer):
    """ShardedDataParallel. Its messages are not shown. OSS makes the job's optimizer again. Backward computes until its
    last gradient is ready, and then waits for reductions: the wait is measured from there."""

    shows_waits = True

    def __init__(self, options: Fairscale, config: Config, workload: Trained) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim import OSS
        made = workload.optimizer
        taken = inspect.signature(type(made)).parameters
        given = {name: value for name, value in made.defaults.items() if name in taken}
        parameters = [p for p in workload.model.parameters() if p.requires_grad]
        optimizer = OSS(parameters, optim=type(made), **given)
        width = next(workload.model.parameters()).element_size()
        self._sharded: Any = ShardedDataParallel(
            workload.model, optimizer, reduce_buffer_size=int(options.bucket_mib * MIB / width), broadcast_buffers=False
        )
        super().__init__(config, workload, self._sharded, optimizer)
        self._gradient = self._begin
        self._hooks = [p.register_post_accumulate_grad_hook(self._stamp) for p in parameters]

    def _stamp(self, _: Tensor) -> None:
        self._gradient = self._executor.record_timestamp()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._sharded.no_sync()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.seen.waits.append((self._gradient, self._executor.record_timestamp()))

    def times(self, whole: Span, phases: Sequence[Span], seen: Seen) -> StepTimes:
        seconds = self._executor.seconds
        seen.waits = [(seconds(begin), seconds(end)) for begin, end in seen.waits]
        return super().times(whole, phases, seen)

    def clip(self, norm: float) -> Tensor:
        return self.optimizer.clip_grad_norm(norm)  # type: ignore[attr-defined]

    def update(self) -> None:
        self.optimizer.step()
        self._sharded.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class FairscaleFsdp(EngineOptions):
    name = "fairscale_fsdp"
    needs_cuda = True

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return FairscaleFsdpEngine(config, workload)


class FairscaleFsdpEngine(Peer):
    """FairScale's FSDP of every block of the model, and of the rest. It shows neither messages nor waits."""

    def __init__(self, config: Config, workload: Trained) -> None:
        from fairscale.nn.data_parallel import FullyShardedDataParallel
        from fairscale.nn.wrap import auto_wrap, enable_wrap
        blocks = set(workload.blocks())

        def is_block(module: nn.Module, recurse: bool, **_: Any) -> bool:
            return recurse or module in blocks

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, auto_wrap_policy=is_block):
            inner = auto_wrap(workload.model)
        self._sharded: Any = FullyShardedDataParallel(inner)
        super().__init__(config, workload, self._sharded, workload.optimizer_of(self._sharded))

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._sharded.no_sync()

    def clip(self, norm: float) -> Tensor:
        import torch
        return torch.as_tensor(self._sharded.clip_grad_norm_(norm))
