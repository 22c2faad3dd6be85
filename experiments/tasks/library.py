"""Base class of models of transformers. Weights may come from a folder or the hub, if their model has the same numbers."""

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
        None, "what training starts from: a folder that save_pretrained has written, or a name on the hub; null: random weights",
        profiled=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is None:
            return
        try:
            there = json.loads(_config_of(self.weights).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            told = f"must be a folder with a model's config.json, or a name on the hub, got {self.weights}"
            raise OptionError("weights", told) from error
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

        return cls.from_pretrained(self.weights, config=config, local_files_only=Path(self.weights).is_dir(), dtype=torch.float32)


def _config_of(weights: str) -> Path:
    """The config.json of a folder, or of a model on the hub, which is kept in its cache. Raises OSError or ValueError."""
    if Path(weights).is_dir() or weights.startswith(("/", ".", "~")):
        return Path(weights) / "config.json"
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(weights, "config.json"))
