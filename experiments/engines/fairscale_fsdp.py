"""FairScale's FullyShardedDataParallel around every block and around the rest. It runs only on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, EngineOptions
from experiments.engines.base import Engine, Peer, Trained

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class FairscaleFsdp(EngineOptions):
    name = "fairscale_fsdp"
    needs_cuda = True

    def prepare(self, config: Config, workload: Trained) -> Engine:
        """Wrap every block of the model, and the rest."""
        return FairscaleFsdpEngine(config, workload)


class FairscaleFsdpEngine(Peer):
    """FairScale's FSDP. It shows neither messages nor waits."""

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
