"""A stand-in for a model on a missing device: parameters, gradients and updates are real, but compute only waits.

Compute sleeps for its time and leaves the cores to messages and updates. So ranks on a few cores stand for as many
devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.inputs import Images
from experiments.tasks.model import Model
from mdcs.options import option
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from experiments.tasks.task import Task

_FP32 = 4  # bytes, in which block_mib counts


@dataclass(frozen=True, kw_only=True)
class Timed(Model):
    """Equal blocks that wait."""

    computes = False

    layers: int = option(12, "blocks", at_least=1)
    block_mib: float = option(5.722, "parameters of a block, in float32", above=0)
    forward_ms: float = option(32.0, "milliseconds that the forward of a block takes", at_least=0)
    backward_ms: float = option(64.0, "milliseconds that the backward of a block takes", at_least=0)
    activations_mib: float = option(0.0, "MiB that a block keeps from forward to backward", at_least=0)
    checkpointing: bool = option(False, "every block recomputes its activations in backward, by torch's checkpoint")
    tensors: int = option(4, "parameters that a block is made of, where it has so many elements", at_least=1)

    @property
    def label(self) -> str:
        """The name with ", timed compute", so that no table shows it as a model that computes."""
        return f"{self.name}, timed compute"

    @property
    def made_of(self) -> dict[str, str]:
        """The mark of timed compute."""
        return {"compute": "timed"}

    @property
    def inputs(self) -> Images:
        """One number per block. Labels are the targets of the weighted sum of the numbers."""
        return Images(1, self.layers, 2, flat=True)

    def make(self) -> Task:
        """Make the task. Every block is a unit."""
        from torch import nn

        from experiments.tasks.task import Task
        from experiments.tasks.waiting import Block, Clock, Waiting, squared_error

        numel, kept = max(1, round(self.block_mib * MIB / _FP32)), round(self.activations_mib * MIB)
        seconds, clock = (self.forward_ms * 1e-3, self.backward_ms * 1e-3), Clock()
        blocks = (Block(numel, self.tensors, kept, *seconds, clock, self.checkpointing) for _ in range(self.layers))
        return Task(Waiting(nn.ModuleList(blocks)), squared_error, ("Block",), self.inputs)
