"""Base classes of trackers: an option of a config that makes a mirror of one run. Imports no tracker's package."""

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
    """Description of a run for its mirror.

    - folder: for the tracker's own files.
    - id: unique; ids of equal jobs begin with the same text.
    - name: of the run.
    - group: of the runs of a sweep.
    - kind: profile, plan, train, compare, or sweep, which stands for all runs of a group.
    - config: the resolved config as plain containers.
    """

    folder: Path
    id: str
    name: str
    group: str | None
    kind: str
    config: Mapping[str, Any]


class Mirror:
    """Receives a run's events and files. A method that is not overridden shows nothing. Methods may raise."""

    def past(self, steps: Sequence[Event]) -> None:
        """Show the earlier steps and evaluations of a resumed run again. A mirror that has kept them overrides this."""
        for step in steps:
            self.event(step)

    def event(self, event: Event) -> None:
        """Show an event of metrics.jsonl (:mod:`analysis.events`)."""

    def pictures(self, files: Sequence[Path]) -> None:
        """Show PNG files."""

    def document(self, kind: str, file: Path, used: bool) -> None:
        """Show a file that describes the run: its "profile" or its "plan". used: another run has made it."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Show a sweep's table, a row per run."""

    def finish(self, ok: bool) -> None:
        """End the mirror. This is the last call."""


@dataclass(frozen=True)
class Tracker(Checked, ABC):
    """The tracker that a config chooses. `name` is for configs, `title` is for people."""

    name: ClassVar[str] = "tracker"
    title: ClassVar[str] = "the tracker"

    shows: ClassVar[bool] = True
    """Whether the tracker shows anything. If not, neither a mirror nor pictures are made."""

    @property
    def patience_s(self) -> float:
        """Seconds that a call of the mirror may take before it is given up."""
        return 30.0

    @abstractmethod
    def mirror(self, run: Shown) -> Mirror:
        """Make the mirror of a run. Called, like all methods of the mirror, in a thread of its own."""


@dataclass(frozen=True)
class NoTracker(Tracker):
    """No tracker: metrics.jsonl alone."""

    name = "none"
    shows = False

    def mirror(self, run: Shown) -> Mirror:
        """A mirror that shows nothing."""
        return Mirror()


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings; keys are joined by "/", and values of None are left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            result[f"{prefix}{key}"] = value
    return result


_CHARTS = {"loss": "loss_rank0"}


def train_values(step: Event) -> dict[str, Any]:
    """Values of a step event by the names of charts: train/step, train/step_s, train/bytes/AR. The loss is rank 0's."""
    return flat({_CHARTS.get(key, key): value for key, value in step.items() if key != "event"}, "train/")


def predicted_values(start: Event) -> dict[str, Any]:
    """Predicted values of a start event, for charts beside those of `train_values`: predicted/step_s; none for other
    events."""
    return {
        f"predicted/{key}": value
        for key, value in start.get("predicted", {}).items()
        if isinstance(value, (int, float))
    }
