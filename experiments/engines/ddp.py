"""torch's DistributedDataParallel, with the times of its own timers, and DataParallel: one process for all devices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from experiments.config.schema import Config, ConfigError, EngineOptions
from experiments.engines.base import Engine, Peer, Seen, Trained
from mdcs.options import option
from mdcs.plan.cost import StepTimes
from mdcs.profile.link import Kind
from mdcs.telemetry.timeline import Span, length

_NS = 1e-9


@dataclass(frozen=True)
class Ddp(EngineOptions):
    name = "ddp"
    bucket_mib: float = option(25.0, "size of a bucket of gradients, MiB", above=0)
    overlap: bool = option(True, "reduce during backward; false: after it, all at once")

    @property
    def label(self) -> str:
        return self.name if self.overlap else f"{self.name}_no_overlap"

    def prepare(self, config: Config, workload: Trained) -> Engine:
        return DdpEngine(self, config, workload)


class DdpEngine(Peer):
    """DDP. Communication lasts from the start of the first bucket to the end of the last, as DDP's timers report it."""

    def __init__(self, options: Ddp, config: Config, workload: Trained) -> None:
        from torch.nn.parallel import DistributedDataParallel
        self._ddp: Any = DistributedDataParallel(  # `drain` broadcasts buffers before evaluation, for all engines
            workload.model, bucket_cap_mb=options.bucket_mib, gradient_as_bucket_view=True, broadcast_buffers=False
        )
        self._overlap = options.overlap
        if not options.overlap:
            # A lambda, for DDP refuses annotations that are not its own classes.
            self._ddp.register_comm_hook([], lambda held, bucket: _reduce_after_backward(held, bucket))
        self._ddp._set_ddp_runtime_logging_sample_rate(1)
        self._timed: dict[int, dict[str, Any]] = {}
        super().__init__(config, workload, self._ddp, workload.optimizer)
        size = sum(p.numel() * p.element_size() for p in workload.model.parameters() if p.requires_grad)
        self._sent = self.collectives.sent(Kind.AR, size, workload.world)

    def synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._ddp.no_sync()

    def reduce(self) -> None:
        """Read DDP's timers: DDP has reduced all gradients, and overwrites its timers in the next step."""
        self._ddp.logger.set_runtime_stats_and_log()
        self._timed[id(self.seen)] = self._ddp._get_ddp_logging_data()
        self.seen.sent[str(Kind.AR)] = self._sent

    def times(self, whole: Span, phases: Sequence[Span], seen: Seen) -> StepTimes:
        timed = self._timed.pop(id(seen))
        names = ("forward_compute_time", "backward_compute_time", "backward_comm_time",
                 "backward_compute_comm_overlap_time")  # fmt: skip
        if any(name not in timed for name in names):
            return StepTimes.of(whole[1] - whole[0])
        forward, backward, communication, overlap = (timed[name] * _NS for name in names)
        if not self._overlap:  # DDP's timer starts when the first bucket is ready
            communication, overlap = communication - overlap, 0.0
        # Before the last micro-step nothing is sent.
        return StepTimes.of(whole[1] - whole[0], length(phases[:-1]) + forward + backward, communication, overlap)


def _reduce_after_backward(held: list[tuple[Any, Any]], bucket: Any) -> Any:
    """Hook of DDP for a bucket whose gradients are ready: with the last one, all leave. Returns its Future."""
    import torch
    import torch.distributed as dist
    flat = bucket.buffer()
    reduced: Any = torch.futures.Future(devices=[flat.device] if flat.is_cuda else [])
    held.append((flat, reduced))
    if bucket.is_last():
        for each, done in held:
            work = dist.all_reduce(each.div_(dist.get_world_size()), async_op=True)
            work.get_future().then(lambda ended, each=each, done=done: _hand_over(ended, each, done))
        held.clear()
    return reduced


def _hand_over(ended: Any, flat: Any, reduced: Any) -> None:
    """Complete the Future of a bucket with its gradients, or with the error of its reduction."""
    try:
        ended.value()
    except RuntimeError as error:
        reduced.set_exception(error)
    else:
        reduced.set_result(flat)


@dataclass(frozen=True)
class DataParallel(EngineOptions):
    """Options of torch's DataParallel. Messages and waits are not recorded; the first device computes the loss."""

    name = "dataparallel"
    needs_cuda = True

    def check(self, config: Config) -> None:
        super().check(config)
        if (got := config.cluster.ranks) != 1:
            problem = f"must be 1 with engine=dataparallel: one process, all devices; got {got}"
            raise ConfigError("cluster.ranks", problem)

    def require(self) -> None:
        import torch
        if (devices := torch.cuda.device_count()) < 2:
            raise ConfigError("engine", f"dataparallel needs several CUDA devices, and torch finds {devices}")

    def prepare(self, config: Config, workload: Trained) -> Engine:
        import torch
        return Peer(config, workload, torch.nn.DataParallel(workload.model), workload.optimizer)
