"""Where metrics can go besides metrics.jsonl, which is always written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from experiments.job.tracking import Mirror, NoMirror, WandbMirror
from mdcs.options import Checked, option


@dataclass(frozen=True)
class Tracker(Checked, ABC):
    """What a config chooses. `name` is a class's own."""

    name: ClassVar[str] = "tracker"
    shows_pictures: ClassVar[bool] = True
    """Whether the pictures of a run are worth drawing for it."""

    @abstractmethod
    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """What is shown the events of the run in `folder`; it cannot stop the run."""


@dataclass(frozen=True)
class NoTracker(Tracker):
    """metrics.jsonl alone."""

    name = "none"
    shows_pictures = False

    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """Nothing."""
        return NoMirror()


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases."""

    name = "wandb"

    project: str = option("mdcs", "W&B project")
    entity: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group; null: the name of the sweep")
    mode: str | None = option(
        None, "null: online with a W&B account on this machine, else offline", choices=("offline", "online", "disabled")
    )

    def mirror(self, folder: Path, *, name: str, group: str | None, config: Mapping[str, Any]) -> Mirror:
        """A run of W&B, its files in the folder."""
        return WandbMirror(self, folder, name=name, group=group, config=config)
