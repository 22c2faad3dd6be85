"""Base class of models that a config can choose: a dataclass of a family's numbers, which builds the model from them.

Weights are random unless a family takes others. This module imports no torch: a config is checked before any process
starts, and importing torch takes seconds. A family imports its libraries in `make`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from experiments.tasks.inputs import Images, Inputs, Tokens
from mdcs.options import Checked, option
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Model(Checked, ABC):
    """The options that all models share. A subclass adds its numbers, its inputs, and `make`."""

    computes: ClassVar[bool] = True
    """Whether forward and backward use the cores."""

    name: str = option("", "name of the model in tables", profiled=False)
    wrap: str = option("block", "rule that cuts the model into units", choices=("block", "size", "leaf"))
    wrap_min_params: int = option(100_000, "wrap=size: smallest unit, in parameters", at_least=1)
    frozen: tuple[str, ...] = option((), "parameters that are not trained: patterns of names (fnmatch)")
    norms_fp32: bool = option(False, "norms stay in fp32 with run.precision=bf16 or fp16")

    @property
    def checkpointing(self) -> bool:
        """Return whether backward recomputes activations. Families that support recomputation make this an option."""
        return False

    @property
    def label(self) -> str:
        """Name of the model in tables and pictures."""
        return self.name

    @property
    def made_of(self) -> dict[str, str]:
        """Further values on which a profile depends besides the options, by name, e.g. hashes of files."""
        return {}

    @property
    def fills_cache(self) -> bool:
        """Return whether the first build on a machine downloads what later ones find there."""
        return False

    @property
    @abstractmethod
    def inputs(self) -> Inputs:
        """The inputs that the model reads."""

    @abstractmethod
    def make(self) -> Task:
        """Make the task with a new model. Its weights come from torch's global generator."""

    def build(self, *, seed: int = 0) -> Task:
        """Make the task with a new model in training mode, on the CPU. Its weights depend only on `seed`.

        The global generator is left unchanged. Under `with torch.device("meta")` the model has shapes but no memory.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed every accelerator
            task = self.make()
        task.model.train()
        return task


@dataclass(frozen=True, kw_only=True)
class TextModel(Model):
    """The options of a language model."""

    masked: ClassVar[bool] = False

    sequence: int = option(512, "tokens in a sequence", at_least=1)
    vocab: int = option(256, "tokens in the vocabulary", at_least=2)
    tie: bool = option(True, "input and output embeddings are one parameter")

    @property
    def inputs(self) -> Tokens:
        """Sequences with the next token of each position as label, or with some tokens masked."""
        return Tokens(self.sequence, self.vocab, self.masked)


@dataclass(frozen=True, kw_only=True)
class ImageModel(Model):
    """The options of a classifier of images."""

    flat: ClassVar[bool] = False
    """Whether an image is a row of values."""

    image: int = option(224, "pixels along an edge", at_least=1)
    channels: int = option(3, "channels of an image", at_least=1)
    classes: int = option(1000, "classes of images", at_least=2)

    @property
    def inputs(self) -> Images:
        """Images in their own shape, or flat."""
        return Images(self.image, self.channels, self.classes, self.flat)


@dataclass(frozen=True, kw_only=True)
class Mlp(ImageModel):
    """`depth` linear layers with ReLU in between, on flat images. It is the model that starts fastest."""

    flat = True

    depth: int = option(4, "linear layers", at_least=1)
    width: int = option(256, "hidden size", at_least=1)

    def make(self) -> Task:
        """Make the task. Every linear layer is a unit."""
        from torch import nn

        from experiments.tasks.task import Task, cross_entropy

        sizes = [self.inputs.features, *[self.width] * (self.depth - 1), self.classes]
        model = nn.Sequential()
        for i, pair in enumerate(itertools.pairwise(sizes)):
            if i:
                model.add_module(f"relu{i}", nn.ReLU())
            model.add_module(f"linear{i}", nn.Linear(*pair))
        return Task(model, cross_entropy, ("Linear",), self.inputs)


_FP32 = 4  # bytes, in which block_mib counts


@dataclass(frozen=True, kw_only=True)
class Timed(Model):
    """A stand-in for a model on a missing device: parameters, gradients and updates are real, but compute only waits.

    Compute sleeps for its time and leaves the cores to messages and updates. So ranks on a few cores stand for as many
    devices.
    """

    computes = False

    layers: int = option(12, "blocks", at_least=1)
    block_mib: float = option(5.722, "parameters of a block, in float32", above=0)
    forward_ms: float = option(32.0, "milliseconds that the forward of a block takes", at_least=0)
    backward_ms: float = option(64.0, "milliseconds that the backward of a block takes", at_least=0)
    activations_mib: float = option(0.0, "MiB that a block keeps from forward to backward", at_least=0)
    checkpointing: bool = option(False, "every block recomputes its activations in backward, by torch's checkpoint")
    tensors: int = option(4, "parameter tensors of a block", at_least=1)

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
