"""DDP's reductions without overlap: all of them after backward, in buckets that are in flight together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.config.schema import Config, EngineOptions
from experiments.engines.base import Engine, Peer, Trained
from mdcs.options import option
from mdcs.profile.link import Kind
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DdpNoOverlap(EngineOptions):
    name = "ddp_no_overlap"

    bucket_mib: float = option(25.0, "gradients are reduced in buckets of about so much", above=0)

    def prepare(self, config: Config, workload: Trained) -> Engine:
        """Use the model as it is; all ranks get rank 0's values."""
        return DdpNoOverlapEngine(self, config, workload)


class DdpNoOverlapEngine(Peer):
    shows_waits = shows_messages = True  # forward and backward have neither

    def __init__(self, options: DdpNoOverlap, config: Config, workload: Trained) -> None:
        import torch.distributed as dist

        if workload.world > 1:
            for tensor in [*workload.model.parameters(), *workload.model.buffers()]:
                dist.broadcast(tensor.data, 0)
        self._parameters = [p for p in workload.model.parameters() if p.requires_grad]
        self._bucket = int(options.bucket_mib * MIB)
        super().__init__(config, workload, workload.model, workload.optimizer)

    def reduce(self) -> None:
        import torch
        import torch.distributed as dist

        from mdcs.torch_compat import copy_all

        if self.workload.world == 1:
            return
        begin = self._executor.seconds(self._executor.record_timestamp())
        flights = []
        for bucket in _buckets([p.grad for p in self._parameters if p.grad is not None], self._bucket):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(self.workload.world)
            flights.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        size = 0
        for bucket, flat, work in flights:
            work.wait()
            size += flat.nbytes
            parts = flat.split([gradient.numel() for gradient in bucket])
            copy_all(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])
        end = self._executor.seconds(self._executor.record_timestamp())
        self.seen.message(Kind.AR, self.collectives.sent(Kind.AR, size, self.workload.world), (begin, end))
        self.seen.count[str(Kind.AR)] = len(flights)


def _buckets(gradients: list[Tensor], size: int) -> list[list[Tensor]]:
    """Gradients in the order of backward, in buckets of at most ``size`` bytes or of one gradient."""
    buckets: list[list[Tensor]] = []
    free = 0
    for gradient in reversed(gradients):
        if not buckets or gradient.nbytes > free:
            buckets.append([])
            free = size
        buckets[-1].append(gradient)
        free -= gradient.nbytes
    return buckets
