"""Wait-free back-propagation: messages as ready, in the order of the computation.

Reductions are issued when a unit's backward ends (Poseidon, PyTorch DDP). Gathers have no such moment:
zero1's follows its reduction at once, as in a decomposed all-reduce; sdp's and fsdp's are prefetched one unit
ahead, as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.plan.messages import Op, Plan, Strategy
from mdcs.plan.mix import Draft, Mix


def ready_slot(mix: Mix, op: Op) -> int:
    """The slot at which WFBP issues an operation (unrolled)."""
    first, last = mix.window(op)
    if not op.kind.is_gather or mix.strategies[op.unit] is Strategy.zero1:
        return first
    return max(first, last - 1)


def in_ready_order(mix: Mix) -> list[Op]:
    """Operations by issue slot; of one slot, reductions first, then gathers by deadline."""
    return sorted(mix.ops, key=lambda op: (ready_slot(mix, op), op.kind.is_gather, mix.window(op)[1]))


def as_ready(mix: Mix, name: str, blocks: tuple[tuple[int, ...], ...]) -> Plan:
    drafts = [
        Draft(op.kind, ((op.unit, b),), ready_slot(mix, op), op.micro)
        for op in in_ready_order(mix)
        for b in range(len(blocks[op.unit]))
    ]
    return mix.plan(name, blocks, drafts)


@dataclass(frozen=True)
class Wfbp:
    def schedule(self, mix: Mix) -> Plan:
        return as_ready(mix, "wfbp", mix.whole())


@dataclass(frozen=True)
class Partitioning:
    """WFBP with every unit cut into blocks of ``block_bytes`` (0: the link's block)."""

    block_bytes: int = 0

    def schedule(self, mix: Mix) -> Plan:
        return as_ready(mix, "partitioning", mix.cut(self.block_bytes or mix.profile.block))
