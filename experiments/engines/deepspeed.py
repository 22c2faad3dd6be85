"""DeepSpeed's ZeRO, stages 1 to 3, with torch's optimizer."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.config.schema import Config, ConfigError, EngineOptions
from experiments.engines.base import Engine, Peer, Trained
from mdcs.options import option
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Deepspeed(EngineOptions):
    name = "deepspeed"
    stage: int = option(2, "stage of ZeRO", at_least=1, at_most=3)
    bucket_mib: float | None = option(
        None, "size of a bucket of parameters or gradients, MiB; null: DeepSpeed's default", above=0
    )

    @property
    def label(self) -> str:
        return f"{self.name} {self.stage}"

    def require(self) -> None:
        if importlib.util.find_spec("deepspeed") is None:
            how = "DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
            raise ConfigError("engine", f"deepspeed is not installed: {how}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return DeepspeedEngine(self, config, workload)


class DeepspeedEngine(Peer):
    """DeepSpeed. It shows neither messages nor waits."""

    def __init__(self, options: Deepspeed, config: Config, workload: Trained) -> None:
        os.environ.setdefault("DS_ACCELERATOR", workload.device.type)
        import deepspeed
        # DeepSpeed would compile an all-reduce for inference, for a minute. A compiler that is killed leaves a lock,
        # for which every later start waits forever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        zero: dict[str, Any] = {"stage": options.stage}
        if options.bucket_mib is not None:
            elements = int(options.bucket_mib * MIB / next(workload.model.parameters()).element_size())
            sizes = "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size"
            zero |= dict.fromkeys(sizes, elements)
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": config.data.batch_size,
            "gradient_accumulation_steps": config.run.accumulation,
            "gradient_clipping": config.optimizer.clip_norm or 0.0, "zero_optimization": zero,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 2**31,
        }  # fmt: skip
        self._zero, *_ = deepspeed.initialize(
            model=workload.model, optimizer=workload.optimizer, config=settings, dist_init_required=False
        )
        super().__init__(config, workload, self._zero, workload.optimizer)
        self._clips = self._clip is not None
        self._clip = None  # ZeRO clips in its step

    def backward(self, loss: Tensor) -> None:
        self._zero.backward(loss, scale_wrt_gas=False)  # the loss is divided already
        if not self._zero.is_gradient_accumulation_boundary():
            self._zero.step()

    def update(self) -> None:
        self._zero.step()
        if self._clips:
            self.seen.grad_norm = self._zero.get_global_grad_norm()

    def close(self) -> None:
        self._zero.destroy()
