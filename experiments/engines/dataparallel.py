"""torch's nn.DataParallel: one process for all devices; each device gets a part of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.config.schema import Config, ConfigError, EngineOptions
from experiments.engines.base import Engine, Peer, Trained
from mdcs.options import option

if TYPE_CHECKING:
    from torch import Tensor, nn

    from experiments.engines.base import Batch


@dataclass(frozen=True)
class DataParallel(EngineOptions):
    name = "dataparallel"
    needs_cuda = True

    loss_inside: bool = option(False, "each device computes the loss of its part")

    def check(self, config: Config) -> None:
        """Raise ConfigError for several processes: one process drives all devices."""
        super().check(config)
        if config.cluster.ranks != 1:
            got = config.cluster.ranks
            raise ConfigError("cluster.ranks", f"must be 1 with engine=dataparallel: one process, all devices; got {got}")

    def require(self) -> None:
        """Raise ConfigError with fewer than two devices."""
        import torch

        if (devices := torch.cuda.device_count()) < 2:
            raise ConfigError("engine", f"dataparallel needs several CUDA devices, and torch finds {devices}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        """Wrap the model, on all devices."""
        return DataParallelEngine(self, config, workload)


class DataParallelEngine(Peer):
    """DataParallel. It shows neither messages nor waits.

    Without `loss_inside`, outputs are gathered on the first device, which computes the loss.
    """

    def __init__(self, options: DataParallel, config: Config, workload: Trained) -> None:
        import torch

        devices = list(range(torch.cuda.device_count()))
        self._inside = options.loss_inside
        model = torch.nn.DataParallel(_with_loss(workload) if self._inside else workload.model, device_ids=devices)
        super().__init__(config, workload, model, workload.optimizer)

    def loss(self, batch: Batch) -> Tensor:
        if not self._inside:
            return super().loss(batch)
        parts: Tensor = self.model(**batch)
        return parts.mean()


def _with_loss(workload: Trained) -> nn.Module:
    """A module whose forward returns the loss of a part of the batch."""
    from torch import nn

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = workload.model

        def forward(self, **batch: Tensor) -> Tensor:
            return workload.loss(batch, self.module)

    return WithLoss()
