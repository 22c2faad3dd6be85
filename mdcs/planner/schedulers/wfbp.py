"""Wait-free back-propagation: messages as ready, in the order of the computation.

Reductions are issued when a unit's backward ends (Poseidon, PyTorch DDP). Gathers have no such moment:
zero1's follows its reduction at once, as in a decomposed all-reduce; sdp's and fsdp's are prefetched one unit
ahead, as FSDP does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mdcs.options import Checked, option
from mdcs.plan.early import in_order
from mdcs.plan.messages import Plan
from mdcs.plan.mix import Draft, Mix
from mdcs.plan.period import Op
from mdcs.plan.strategy import Strategy
from mdcs.sizes import MIB


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
    """A plan with a message per block, issued when WFBP would."""
    drafts = [
        Draft(op.kind, ((op.unit, b),), ready_slot(mix, op), op.micro)
        for op in in_ready_order(mix)
        for b in in_order(mix.profile, op.unit, blocks[op.unit])
    ]
    return mix.plan(name, blocks, drafts)


@dataclass(frozen=True)
class Wfbp:
    """One message per unit and kind."""

    name: ClassVar[str] = "wfbp"

    def schedule(self, mix: Mix) -> Plan:
        """Messages as ready, in the order of the computation."""
        return as_ready(mix, "wfbp", mix.whole())


@dataclass(frozen=True)
class Blocks(Checked):
    """What schedulers that cut units have."""

    block_mib: float | None = option(None, "size of a block, MiB; null: the smallest that saturates the link", above=0)

    def cut(self, mix: Mix) -> tuple[tuple[int, ...], ...]:
        """The blocks of every unit, in elements."""
        return mix.cut(mix.profile.block if self.block_mib is None else max(1, int(self.block_mib * MIB)))


@dataclass(frozen=True)
class Partitioning(Blocks):
    """WFBP with every unit cut into blocks."""

    name: ClassVar[str] = "partitioning"

    def schedule(self, mix: Mix) -> Plan:
        """Messages as ready, a block each."""
        return as_ready(mix, self.name, self.cut(mix))
