"""Throughput of a job: samples and tokens per second of all ranks, and the share of the device's peak rate (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

if TYPE_CHECKING:
    from experiments.job.workload import Workload


@dataclass(frozen=True)
class Throughput:
    """Work of one step of a job.

    - samples: of all ranks.
    - tokens: of all ranks; None for models that do not read tokens.
    - flops: of forward and backward on one rank, without recomputation; None where they cannot be counted or are not
      asked for.
    - peak: of one device, FLOPs/s; None where it is not given.
    """

    samples: int
    tokens: int | None = None
    flops: float | None = None
    peak: float | None = None

    def in_step(self, seconds: float) -> dict[str, float]:
        """The rates of a step that took `seconds`, by their names in events."""
        return {
            "throughput_samples_s": self.samples / seconds,
            **({} if self.tokens is None else {"throughput_tokens_s": self.tokens / seconds}),
            **({} if self.flops is None or self.peak is None else {"mfu": self.flops / seconds / self.peak}),
        }


def throughput_of(workload: Workload) -> Throughput:
    """The throughput of a workload whose model no engine has wrapped yet.

    FLOPs are counted if `cluster.peak_tflops` says what to compare them with: three times those of a forward pass.
    """
    config, samples = workload.config, workload.samples_per_step
    each = config.data.tokens(workload.task.inputs)
    tokens = None if each is None else samples * each
    if config.cluster.peak_tflops is None or not config.model.computes:
        return Throughput(samples, tokens)
    peak = config.cluster.peak_tflops * 1e12
    batch = next(config.data.batches(workload.task.inputs, rank=workload.rank, world=workload.world))
    try:
        forward = forward_flops(workload.model, workload.task.loss, batch, workload.dtype)
    except Exception:  # the model's own code, on tensors without values
        return Throughput(samples, tokens)
    return Throughput(samples, tokens, 3.0 * forward * config.run.accumulation, peak)


def forward_flops(model: nn.Module, loss: Any, batch: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """FLOPs of a forward pass, counted on tensors that have shapes and no memory. Raises what the model raises on them.
    """
    meta = {key: v.to("meta", dtype if v.is_floating_point() else None) for key, v in batch.items()}
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss(_OnMeta(model), meta)
    return counter.get_total_flops()


class _OnMeta(nn.Module):
    """A model, called with parameters and buffers on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._call = model
        self._state = {name: v.to("meta") for name, v in [*model.named_parameters(), *model.named_buffers()]}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return functional_call(self._call, self._state, args, kwargs)
