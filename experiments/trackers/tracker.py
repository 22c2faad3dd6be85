"""Base classes of trackers: an option of a config that makes a mirror of one run; and TensorBoard."""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mdcs.options import Checked

Event = Mapping[str, Any]
PATIENCE_S = 30.0
"""Seconds that a call of a mirror may take before it is given up, of a tracker that has no `timeout_s`."""


@dataclass(frozen=True)
class Shown:
    """Description of a run for its mirror."""

    folder: Path  # for the tracker's own files
    id: str  # unique; ids of equal jobs begin with the same text
    name: str
    group: str | None  # of the runs of a sweep
    kind: str  # profile, plan, train, compare, or sweep, which stands for all runs of a group
    config: Mapping[str, Any]  # the resolved config as plain containers


class Mirror:
    """Receives a run's events and files. A method that is not overridden shows nothing. Methods may raise.

    - event: of metrics.jsonl (:mod:`analysis.events`).
    - pictures: PNG files.
    - document: a file that describes the run: its "profile" or its "plan". used: another run has made it.
    - table: of a sweep, a row per run.
    - finish: the last call.
    """

    def past(self, steps: Sequence[Event]) -> None:
        """Show the earlier steps and evaluations of a resumed run again. A mirror that has kept them overrides this."""
        for step in steps:
            self.event(step)

    def event(self, event: Event) -> None: ...
    def pictures(self, files: Sequence[Path]) -> None: ...
    def document(self, kind: str, file: Path, used: bool) -> None: ...
    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None: ...
    def finish(self, ok: bool) -> None: ...


@dataclass(frozen=True)
class Tracker(Checked, ABC):
    """The tracker that a config chooses. `name` is for configs, `title` is for people."""

    name: ClassVar[str] = "tracker"
    title: ClassVar[str] = "the tracker"
    shows: ClassVar[bool] = True  # Whether the tracker shows anything. If not, neither a mirror nor pictures are made.

    @abstractmethod
    def mirror(self, run: Shown) -> Mirror:
        """Make the mirror of a run. Called, like all methods of the mirror, in a thread of its own."""


@dataclass(frozen=True)
class NoTracker(Tracker):
    """Only metrics.jsonl."""

    name = "none"
    shows = False

    def mirror(self, run: Shown) -> Mirror:
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


def train_values(step: Event) -> dict[str, Any]:
    """Values of a step event by the names of charts: train/step, train/step_s, train/bytes/AR. The loss is rank 0's."""
    named = {"loss_rank0" if key == "loss" else key: value for key, value in step.items() if key != "event"}
    return flat(named, "train/")


def predicted_values(start: Event) -> dict[str, Any]:
    """Predicted values of a start event, for charts beside `train_values`: predicted/step_s; of others none."""
    predicted = start.get("predicted", {}).items()
    return {f"predicted/{key}": value for key, value in predicted if isinstance(value, (int, float))}


class Aside:
    """Calls a mirror's methods in order, in another thread. The caller waits only in `finish`. title: for warnings.
    timeout_s (s): the mirror is given up when one call takes longer. make: starts the mirror. Warnings come from the
    caller's thread, at its next call."""

    def __init__(self, title: str, timeout_s: float, make: Callable[[], Mirror]) -> None:
        self._title, self._timeout_s = title, timeout_s
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._doing, self._since = "start", time.monotonic()  # since: infinite between two calls
        self._failure = ""
        self._left_alone = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=title, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        self._look()
        if not self._left_alone:
            self._calls.put((method, arguments))

    def finish(self, ok: bool) -> None:
        """Have the mirror finish, and wait for it while each call ends within `timeout_s`."""
        self.call("finish", ok)
        while self._thread.is_alive() and not self._left_alone:
            self._thread.join(0.05)
            self._look()
        self._look()

    def _look(self) -> None:
        silent = time.monotonic() - self._since > self._timeout_s
        reason = self._failure or (f"no answer for {self._timeout_s:g} s" if silent else "")
        if reason and not self._left_alone:
            self._left_alone = True
            warnings.warn(f"{self._title} could not {self._doing}, the run goes on without it: {reason}", stacklevel=3)

    def _work(self, make: Callable[[], Mirror]) -> None:
        try:
            mirror = make()
            while self._doing != "finish":
                self._since = math.inf
                method, arguments = self._calls.get()
                words = {"event": "log", "finish": "finish"}.get(method, f"log {method}")
                self._doing, self._since = words, time.monotonic()
                getattr(mirror, method)(*arguments)
            self._since = math.inf
        except Exception as error:  # a tracker may raise anything; training continues
            self._failure = one_line(error)


def one_line(error: Exception) -> str:
    """An error's type and text, without secrets."""
    text = str(error)
    if secret := os.environ.get("WANDB_API_KEY"):
        text = text.replace(secret, "$WANDB_API_KEY")
    return f"{type(error).__name__}: {' '.join(text.split()) or 'no reason given'}"


FOLDER = "tensorboard"


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """TensorBoard."""

    name = "tensorboard"
    title = "TensorBoard"

    def mirror(self, run: Shown) -> Mirror:
        return TensorBoardMirror(run)


class TensorBoardMirror(Mirror):
    """The event files of one run. A resumed run writes them anew."""

    def __init__(self, run: Shown) -> None:
        from torch.utils.tensorboard import SummaryWriter
        folder = run.folder / FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        self._predicted: dict[str, Any] = {}
        self._writer: Any = SummaryWriter(str(folder))
        self._text("config", run.config)
        self._text("run", {"id": run.id, "name": run.name, "group": run.group, "kind": run.kind})

    def event(self, event: Event) -> None:
        name = event["event"]
        if name == "step":
            self._scalars(train_values(event) | self._predicted, int(event["step"]))
        elif name == "eval":
            values = {key: value for key, value in event.items() if key not in ("event", "step")}
            self._scalars(flat(values, "eval/"), int(event["step"]))
        else:
            self._predicted = predicted_values(event) or self._predicted
            self._text(name, event)
        self._writer.flush()

    def pictures(self, files: Sequence[Path]) -> None:
        import numpy as np
        from PIL import Image
        for file in files:
            self._writer.add_image(file.stem, np.asarray(Image.open(file).convert("RGB")), dataformats="HWC")

    def document(self, kind: str, file: Path, used: bool) -> None:
        self._writer.add_text(kind, str(file))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        from analysis.table import markdown  # late: pandas takes a second
        self._writer.add_text("runs", markdown(columns, rows))

    def finish(self, ok: bool) -> None:
        self._writer.close()

    def _scalars(self, values: dict[str, Any], step: int) -> None:
        for key, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(key, value, step)

    def _text(self, name: str, value: Any) -> None:
        self._writer.add_text(name, f"```json\n{json.dumps(value, indent=1, default=str)}\n```")
