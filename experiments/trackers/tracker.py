"""What a tracker is: an option that makes a mirror of one run. Imports none of the packages that it may need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mdcs.options import Checked

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """What a mirror is told of its run.

    folder: for the tracker's own files. id: begins alike for jobs that are equal. kind: profile, plan, train, compare, or sweep,
    which stands for all runs of a group. config: the resolved one as plain containers.
    """

    folder: Path
    id: str
    name: str
    group: str | None
    kind: str
    config: Mapping[str, Any]


class Mirror:
    """Something that is shown a run's events and files; of what it does not override it shows nothing. It may raise."""

    def past(self, steps: Sequence[Event]) -> None:
        """The steps and evaluations of a run that goes on, from before: shown again, unless a mirror has kept them."""
        for step in steps:
            self.event(step)

    def event(self, event: Event) -> None:
        """An event of metrics.jsonl (:mod:`analysis.events`)."""

    def pictures(self, files: Sequence[Path]) -> None:
        """PNG files."""

    def document(self, kind: str, file: Path) -> None:
        """A file that says what the run is: its "profile" or its "plan"."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A sweep's: a row per run."""

    def finish(self, ok: bool) -> None:
        """The last call."""


@dataclass(frozen=True)
class Tracker(Checked, ABC):
    """What a config chooses. `name` is a class's own, `title` what people call it."""

    name: ClassVar[str] = "tracker"
    title: ClassVar[str] = "the tracker"

    shows: ClassVar[bool] = True
    """Whether anything is shown: else no mirror is made, and no pictures for it."""

    @property
    def patience_s(self) -> float:
        """An answer that takes longer is not waited for."""
        return 30.0

    @abstractmethod
    def mirror(self, run: Shown) -> Mirror:
        """What is shown the run. Called, like all of the mirror, in a thread of its own."""


@dataclass(frozen=True)
class NoTracker(Tracker):
    """metrics.jsonl alone."""

    name = "none"
    shows = False

    def mirror(self, run: Shown) -> Mirror:
        """Nothing."""
        return Mirror()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by "/"; nulls are left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            result[f"{prefix}{key}"] = value
    return result


_CHARTS = {"loss": "loss_rank0"}


def train_values(step: Event) -> dict[str, Any]:
    """A step event, keys as charts have them: train/step, train/step_s, train/bytes/AR and so on. Its loss is rank 0's."""
    return flat({_CHARTS.get(key, key): value for key, value in step.items() if key != "event"}, "train/")
