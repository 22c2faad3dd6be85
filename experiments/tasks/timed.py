"""A stand-in for a model on a missing device: parameters, gradients and updates are real, but compute only waits.

Its blocks are equal, or they are the units of a profile that was calculated or measured, here or on a GPU. Compute
sleeps for its time and leaves the cores to messages and updates. So ranks on a few cores stand for as many devices.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.tasks.inputs import Images
from experiments.tasks.model import Model
from experiments.tasks.stand_in import Shape, Unit, Use, count, of_profile
from mdcs.options import OptionError, option, options, shown
from mdcs.profile.schema import Profile
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from experiments.tasks.task import Task

_BLOCK = ("layers", "block_mib", "forward_ms", "backward_ms", "activations_mib")
_FP32 = 4  # bytes, in which block_mib counts


@dataclass(frozen=True, kw_only=True)
class Timed(Model):
    """Blocks that wait.

    Raises OptionError for a profile that cannot be read or built, and for options of blocks together with a profile.
    """

    computes = False

    layers: int = option(12, "blocks", at_least=1)
    block_mib: float = option(5.722, "parameters of a block, in float32", above=0)
    forward_ms: float = option(32.0, "milliseconds that the forward of a block takes", at_least=0)
    backward_ms: float = option(64.0, "milliseconds that the backward of a block takes", at_least=0)
    activations_mib: float = option(0.0, "MiB that a block keeps from forward to backward", at_least=0)
    profile: str | None = option(None, "a profile.json whose units and slots are stood in for, instead of blocks", profiled=False)
    divisor: float = option(1.0, "profile: its elements and activations are divided by it, as rates of links are to be", above=0)
    checkpointing: bool = option(False, "every unit recomputes its activations in backward, by torch's checkpoint")
    tensors: int = option(4, "parameters that a unit is made of, where it has so many elements", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile is None:
            if self.divisor != 1:
                raise OptionError("divisor", f"has no effect without model.profile, got {shown(self.divisor)}")
            return
        for name in _BLOCK:
            if getattr(self, name) != options(self)[name].default:
                raise OptionError(name, f"has no effect with model.profile, got {shown(getattr(self, name))}")
        try:
            _ = self.shape
        except (OSError, ValueError, AttributeError) as error:
            raise OptionError("profile", f"{self.profile} is no profile to stand in for: {error}") from error

    @property
    def label(self) -> str:
        """The name with ", timed compute", so that no table shows it as a model that computes."""
        return f"{self.name}, timed compute"

    @property
    def made_of(self) -> dict[str, str]:
        """The mark of timed compute, and a hash of the profile's contents."""
        content = {} if self.profile is None else {"contents": hashlib.sha256(Path(self.profile).read_bytes()).hexdigest()[:16]}
        return {"compute": "timed", **content}

    @cached_property
    def shape(self) -> Shape:
        """The shape of the blocks, or of the profile."""
        if self.profile is not None:
            return of_profile(Profile.from_json(Path(self.profile).read_text(encoding="utf-8")), self.divisor)
        numel, kept = round(self.block_mib * MIB / _FP32), round(self.activations_mib * MIB)
        units = tuple(Unit(f"blocks.{i}", max(1, numel)) for i in range(self.layers))
        uses = tuple(Use(i, self.forward_ms * 1e-3, self.backward_ms * 1e-3, kept) for i in range(self.layers))
        return Shape(units, uses)

    @property
    def inputs(self) -> Images:
        """One number per use of a unit. Labels are the targets of the weighted sum of the numbers."""
        return Images(1, count(self.shape.uses), 2, flat=True)

    def make(self) -> Task:
        """Make the task. Every unit is a block."""
        from experiments.tasks.task import Task
        from experiments.tasks.waiting import Waiting, squared_error

        return Task(Waiting(self.shape, self.tensors, self.checkpointing), squared_error, ("Block",), self.inputs)
