"""torch's nn.DataParallel: one process for all devices; each device gets a part of the batch."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.config.schema import Config, ConfigError, EngineOptions
from experiments.engines.base import Engine, Peer, Trained


@dataclass(frozen=True)
class DataParallel(EngineOptions):
    """It shows neither messages nor waits. Outputs are gathered on the first device, which computes the loss."""

    name = "dataparallel"
    needs_cuda = True

    def check(self, config: Config) -> None:
        """Raise ConfigError for several processes: one process drives all devices."""
        super().check(config)
        if config.cluster.ranks != 1:
            got = config.cluster.ranks
            raise ConfigError(
                "cluster.ranks", f"must be 1 with engine=dataparallel: one process, all devices; got {got}"
            )

    def require(self) -> None:
        """Raise ConfigError with fewer than two devices."""
        import torch

        if (devices := torch.cuda.device_count()) < 2:
            raise ConfigError("engine", f"dataparallel needs several CUDA devices, and torch finds {devices}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        """Wrap the model, on all devices."""
        import torch

        return Peer(config, workload, torch.nn.DataParallel(workload.model), workload.optimizer)
