"""The data set that a model gets if the config names none."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.tasks.data import Data
from experiments.tasks.inputs import Inputs, Tokens
from experiments.tasks.samples import Samples
from experiments.tasks.stdlib_bytes import StdlibBytes
from experiments.tasks.synthetic import Synthetic


@dataclass(frozen=True, kw_only=True)
class Auto(Data):
    """Data that the model can read: text of bytes for language models, else seeded noise."""

    name = "auto"

    def chosen(self, inputs: Inputs) -> Data:
        """The data set for a model that reads ``inputs``."""
        kind = StdlibBytes if isinstance(inputs, Tokens) else Synthetic
        return kind(batch_size=self.batch_size, seed=self.seed, workers=self.workers)

    def samples(self, inputs: Inputs, held_out: bool) -> Samples:
        """Not called: a checked config has the chosen data set."""
        raise NotImplementedError
