"""torch's nn.DataParallel: one process for all devices, each of which gets a part of the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.config.schema import Config
from experiments.engines.base import Batch, Engine, Peer, Trained


def prepare(config: Config, workload: Trained) -> Engine:
    return DataParallel(config, workload)


class DataParallel(Peer):
    """Plain, outputs are gathered on the first device, which computes the loss. It shows neither messages nor waits."""

    def __init__(self, config: Config, workload: Trained) -> None:
        devices = list(range(torch.cuda.device_count()))
        self._inside = bool(config.engine.loss_inside)
        model = nn.DataParallel(_WithLoss(workload) if self._inside else workload.model, device_ids=devices)
        super().__init__(config, workload, model, workload.optimizer)

    def loss(self, batch: Batch) -> Tensor:
        if not self._inside:
            return super().loss(batch)
        parts: Tensor = self.model(**batch)
        return parts.mean()


class _WithLoss(nn.Module):
    """Its forward is the loss of a part of the batch."""

    def __init__(self, workload: Trained) -> None:
        super().__init__()
        self.module, self._loss = workload.model, workload.loss

    def forward(self, **batch: Tensor) -> Tensor:
        return self._loss(batch, self.module)
