"""Wait-free back-propagation: messages are sent when ready, in the order of the computation.

A reduction is issued when the backward of its unit ends (Poseidon, PyTorch DDP). A gather has no such moment. The
gather of zero2 follows its reduction at once, as in a decomposed all-reduce. Gathers of sdp and fsdp are prefetched one
unit ahead, as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.gradient_readiness import blocks_by_readiness
from mdcs.plan.period import Op
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.sizes import MIB


def ready_slot(mix: StrategyAssignment, op: Op) -> int:
    """Return the slot (unrolled) at which WFBP issues an operation."""
    first, last = mix.period.window(op)
    if not op.kind.is_gather or mix.strategies[op.unit] is Strategy.zero2:
        return first
    return max(first, last - 1)


def in_ready_order(mix: StrategyAssignment) -> list[Op]:
    """Return the operations by issue slot. Within one slot, reductions come first, then gathers by deadline."""
    return sorted(mix.ops, key=lambda op: (ready_slot(mix, op), op.kind.is_gather, mix.period.window(op)[1]))


def as_ready(mix: StrategyAssignment, name: str, blocks: tuple[tuple[int, ...], ...]) -> Plan:
    """Return a plan with one message per block, issued at the slots of WFBP."""
    drafts = [
        Message(op.kind, ((op.unit, b),), ready_slot(mix, op), micro=op.micro)
        for op in in_ready_order(mix)
        for b in blocks_by_readiness(mix.profile, op.unit, blocks[op.unit])
    ]
    return mix.plan(name, blocks, drafts)


@dataclass(frozen=True)
class Wfbp:
    """One message per unit and kind."""

    name: ClassVar[str] = "wfbp"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages when ready, in the order of the computation."""
        return as_ready(mix, "wfbp", mix.unpartitioned_blocks())


@dataclass(frozen=True)
class Blocks(Checked):
    """Options of schedulers that partition units."""

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)

    def partition(self, mix: StrategyAssignment) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of every unit, in elements."""
        return mix.partition(mix.profile.block if self.block_mib is None else max(1, int(self.block_mib * MIB)))


@dataclass(frozen=True)
class Partitioning(Blocks):
    """WFBP with every unit partitioned into blocks."""

    name: ClassVar[str] = "partitioning"

    def schedule(self, mix: StrategyAssignment) -> Plan:
        """Return the messages when ready, one per block."""
        return as_ready(mix, self.name, self.partition(mix))
