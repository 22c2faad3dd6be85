"""What can train a job: mdcs, and its peers in the same loop, with the same data and the same measurement.

`prepare` makes the engine of a config; the loop that drives it (`experiments.job.training`) knows `Engine` alone. A module here
is an engine, and has its name in the config; whatever else is installed for it is imported when it is made.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from experiments.config.schema import Config, ConfigError

if TYPE_CHECKING:  # which import torch: whoever starts ranks need not wait for it
    from experiments.engines.base import Engine, Trained


def require(config: Config) -> None:
    """Raise ConfigError for an engine that this machine cannot run; nothing has been started then."""
    name = config.engine.name
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ConfigError("engine.name", "deepspeed is not installed: pip install 'mdcs[deepspeed]'")
    if name == "dataparallel":
        import torch

        if (devices := torch.cuda.device_count()) < 2:
            raise ConfigError("engine.name", f"dataparallel needs several CUDA devices, and torch finds {devices}")


def prepare(config: Config, workload: Trained) -> Engine:
    """The engine of the config, around the model of the job, on every rank. The job has a plan if it is mdcs."""
    module = importlib.import_module(f"experiments.engines.{config.engine.name}")
    engine: Engine = module.prepare(config, workload)
    return engine
