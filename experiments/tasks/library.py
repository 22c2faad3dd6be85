"""Base class of models of transformers. Weights may come from a folder, if its model has the same numbers."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.tasks.model import Model
from mdcs.options import OptionError, option, shown


@dataclass(frozen=True, kw_only=True)
class Library(Model):
    """A model of transformers.

    Raises OptionError for weights that are missing, or that belong to a model with other numbers.
    """

    weights: str | None = option(
        None, "a folder that save_pretrained has written, whose weights training starts from; null: random ones", profiled=False
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            return
        file = Path(self.weights) / "config.json"
        try:
            there = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError("weights", f"must be a folder with a model's config.json, got {self.weights}") from error
        for name, value in self.numbers().items():
            if name in there and there[name] != value:
                raise OptionError("weights", f"{self.weights} has {name}={shown(there[name])}, the model {shown(value)}")

    @abstractmethod
    def numbers(self) -> Mapping[str, Any]:
        """The numbers that determine the model's shape, by transformers' names."""

    def new(self, cls: Any, config: Any) -> Any:
        """A module of class `cls`, with the folder's weights or random ones."""
        if self.weights is None:
            return cls(config)
        import torch

        return cls.from_pretrained(self.weights, config=config, local_files_only=True, dtype=torch.float32)
