"""DeAR: the all-reduce is decoupled; reduce-scatters hide behind backward, all-gathers behind the next forward.

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Op, Plan, Strategy
from mdcs.plan.mix import Draft, Mix
from mdcs.planner.schedulers.fusion import buckets, fuse


@dataclass(frozen=True)
class Dear:
    """``bucket_bytes`` fuses neighbours (0: one message per unit); ``ahead`` is how many slots fsdp prefetches."""

    bucket_bytes: int = 0
    ahead: int = 2

    def __post_init__(self) -> None:
        if self.bucket_bytes < 0 or self.ahead < 0:
            raise ValueError(f"bucket_bytes and ahead must be >= 0, got {self.bucket_bytes} and {self.ahead}")

    def schedule(self, mix: Mix) -> Plan:
        fused = fuse(mix, "dear", lambda stream: buckets(mix, stream, max(1, self.bucket_bytes)))
        turn, period = mix.period.turn, mix.period
        drafts = []
        for m in fused.messages:
            slot = fused.unrolled(m)
            if m.kind.is_gather:
                first = max([turn, *(mix.window(Op(m.kind, u, m.micro))[0] for u, _ in m.parts)])
                keep = all(mix.strategies[u] is not Strategy.fsdp for u, _ in m.parts)
                need = fused.need(m)
                assert need is not None
                slot = first if keep else max(first, need - self.ahead)
            drafts.append((slot % period.length, m.kind.is_gather, fused.need(m) or 0, m, slot))
        drafts.sort(key=lambda d: d[:3])  # gathers of one slot in the order of the forward pass
        return mix.plan("dear", mix.whole(), [Draft(m.kind, m.parts, slot, m.micro) for *_, m, slot in drafts])
