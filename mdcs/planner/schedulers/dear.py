"""DeAR: a decoupled all-reduce. Reduce-scatters overlap with backward, all-gathers with the next forward.

Zhang et al., "DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce Pipelining", ICDCS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.schedulers.fusion import buckets, fuse


@dataclass(frozen=True)
class Dear(Checked):
    """Fuses neighbours up to ``bucket_mib``. Gathers fsdp units ``ahead`` slots before their use."""

    name: ClassVar[str] = "dear"

    bucket_mib: float | None = option(
        None, "fused messages hold about so much, MiB; null: one message per unit", above=0
    )
    ahead: int = option(2, "slots by which fsdp units are gathered ahead", at_least=0)

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the plan: reductions when ready, gathers from the turn on, in the order of the forward pass."""
        fused = fuse(mix, self.name, lambda stream: buckets(mix, stream, self.bucket_mib or 0))
        turn, period = mix.period.turn, mix.period
        drafts = []
        for m, slot, need in zip(fused.messages, fused.schedule.slot, fused.schedule.needed_by, strict=True):
            if m.kind.is_gather:
                first = max([turn, *(mix.period.window(Op(m.kind, u, m.micro))[0] for u, _ in m.parts)])
                keep = not any(mix.strategies[u].regathers for u, _ in m.parts)
                slot = first if keep else max(first, need - self.ahead)
            drafts.append((slot % period.length, m.kind.is_gather, max(need, 0), m, slot))
        drafts.sort(key=lambda d: d[:3])  # gathers of one slot in the order of the forward pass
        return mix.plan(
            self.name,
            mix.unpartitioned_blocks(),
            [Message(m.kind, m.parts, slot, micro=m.micro) for *_, m, slot in drafts],
        )
