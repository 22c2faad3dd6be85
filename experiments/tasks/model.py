"""What a model that can be chosen is: a dataclass of its family's numbers, which builds it from them alone.

No downloads: weights are random, or of a folder. Imports no torch: a config is checked before any process starts, and torch
takes seconds.
A family imports what it needs in `make`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from experiments.tasks.inputs import Inputs
from mdcs.options import Checked, option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Model(Checked, ABC):
    """The options that all models have. A subclass adds its numbers, and says what it reads and how it is made."""

    computes: ClassVar[bool] = True
    """Whether forward and backward take the cores' time."""

    name: str = option("", "of these numbers, in tables", profiled=False)
    wrap: str = option("block", "what becomes a unit", choices=("block", "size", "leaf"))
    wrap_min_params: int = option(100_000, "wrap=size: the smallest unit, in parameters", at_least=1)
    frozen: tuple[str, ...] = option((), "parameters that are not trained: patterns of their names (fnmatch)")
    norms_fp32: bool = option(False, "norms keep fp32 in run.precision=bf16 or fp16")

    @property
    def checkpointing(self) -> bool | str:
        """Whether activations are recomputed in backward; "auto" leaves that to planning. An option where a model can."""
        return False

    @property
    def label(self) -> str:
        """What tables and pictures call it."""
        return self.name

    @property
    def made_of(self) -> dict[str, str]:
        """What a profile depends on beside the options, by name: contents of files."""
        return {}

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """What the model reads."""

    @abstractmethod
    def make(self) -> Task:
        """The task with a new model; its weights come from torch's global generator."""

    def build(self, *, seed: int = 0) -> Task:
        """The task with a new model in training mode, on the CPU, its weights a function of `seed`.

        The global generator is left as it was. `with torch.device("meta")` gives the shapes without the memory.
        """
        from experiments.tasks.task import seeded

        with seeded(seed):
            task = self.make()
        task.model.train()
        return task
