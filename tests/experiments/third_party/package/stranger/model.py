"""A model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from experiments.tasks.data import Images
from experiments.tasks.model import Model
from mdcs.options import OptionError, option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Hourglass(Model):
    """Linear layers that narrow to `waist` and widen again."""

    width: int = option(64, "hidden size", at_least=1)
    waist: int = option(16, "hidden size in the middle", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.waist >= self.width:
            raise OptionError("waist", f"must be < width={self.width}, got {self.waist}")

    @property
    def inputs(self) -> Images:
        return Images(size=8, channels=1, classes=10, flat=True)

    def make(self) -> Task:
        from experiments.tasks.task import Task, cross_entropy
        from stranger.hourglass import Layers

        return Task(Layers(self.inputs.features, self.width, self.waist, 10), cross_entropy, ("Linear",), self.inputs)
