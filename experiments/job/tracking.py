"""Write a run's metrics: to metrics.jsonl, always, and to a tracker if the config has one.

Rank 0 writes one JSON object per line and flushes every line, so a killed run can be read to its last step
(`JsonLines`). The parent process follows the file to show progress (`analysis.events.Tail`) and passes the events to
the config's tracker (`Follower`). So a tracker takes no time and no memory in a rank, sees failed runs too, and cannot
stop a run: after its first failure there is one warning, and it is not called again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import analysis
from analysis.events import METRICS, read_events
from experiments.config.checks import as_mapping
from experiments.config.schema import Config
from experiments.trackers.tracker import PATIENCE_S, Aside, Event, Shown

if TYPE_CHECKING:
    import pandas as pd  # ranks, and programs that only say what is wrong, need not wait for this import

_DOCUMENTS = ("profile", "plan")
_IDS = "tracked_as.json"  # file in a folder: ids of its runs at the tracker, by kind
_TABLE = (
    "name", "model", "strategy", "scheduler", "engine", "world", "budget_bytes", "schedule_share", "status", "step_s",
    "predicted_step_s", "overlap_ratio", "exposed_s", "stalled_s", "peak_bytes", "throughput_samples_s", "plan_hash",
)  # fmt: skip
"""Columns of a sweep's table for a tracker; the settings that were swept are added."""


class JsonLines:
    """Appends events to a file at once, each on a line of its own. There may be only one writer at a time.

    A number that is not finite becomes null: JSON cannot express it. A line that a killed writer left unfinished is
    removed. A line that does not fit on the disk is taken back. Raises OSError with the file's name when the file
    cannot be written.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)
        self._path, self._file = path, path.open("ab", buffering=0)

    def write(self, event: Event) -> None:
        line = (json.dumps(_finite(event), allow_nan=False) + "\n").encode()
        before = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            self._file.truncate(before)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return value


class Follower:
    """Shows a run to its config's tracker: events as they arrive, then the files. Never raises; waits only at the end.
    kind: profile, plan, train or compare. identity: of the job as it was requested (`experiments.job.record`). Steps
    and evaluations of earlier attempts in the folder are shown before the first step that continues them."""

    def __init__(self, config: Config, folder: Path, kind: str, identity: str) -> None:
        self._folder, self._aside, self._past = folder, None, list[Event]()
        self._used = () if config.profile.path is None else ("profile",)
        if config.tracker.shows:
            self._past = former(folder)
            own = identity if kind == "train" else f"{identity}-{kind}"
            if kind == "compare":  # equal jobs run several times
                own += "-" + re.sub(r"[^A-Za-z0-9.-]+", "-", folder.name)
            own = _id(folder, kind, own, goes_on=bool(config.run.resume))
            shown = Shown(folder, own, str(config.run.name), config.run.sweep, kind, as_mapping(config))
            self._aside = _beside(config, shown)

    def event(self, event: Event) -> None:
        if self._aside is None:
            return
        if event["event"] == "resumed" and self._folder.resolve() not in Path(event["folder"]).parents:
            self._past = []  # it resumes another run's checkpoint
        if event["event"] == "step" and self._past:
            earlier = [past for past in self._past if past["step"] < event["step"]]
            self._past = []
            self._aside.call("past", earlier)
        self._aside.call("event", event)

    def pictures(self, files: Sequence[Path]) -> None:
        if self._aside is not None:
            self._aside.call("pictures", files)

    def finish(self, ok: bool) -> None:
        """Show the profile and the plan if the folder has them, and end."""
        if self._aside is not None:
            for kind in _DOCUMENTS:
                if (file := self._folder / f"{kind}.json").is_file():
                    self._aside.call("document", kind, file, kind in self._used)
            self._aside.finish(ok)


def show_files(config: Config, folder: Path, kind: str, identity: str) -> None:
    """Show the "profile" or the "plan" of a job for which no ranks were started."""
    Follower(config, folder, kind, identity).finish(True)


def show_sweep(config: Config, sweep: str, folder: Path, frame: pd.DataFrame, pictures: Sequence[Path]) -> None:
    """Show a sweep's table and pictures to the tracker of one of its jobs, in the group of all of its runs."""
    if not config.tracker.shows:
        return
    own = _id(folder, "sweep", f"sweep-{sweep}", goes_on=not config.sweep.force)
    aside = _beside(config, Shown(folder, own, sweep, sweep, "sweep", {}))
    columns = (*_TABLE, *analysis.swept(frame))
    rows = frame[list(columns)].astype(object)
    aside.call("table", columns, rows.where(rows.notna(), None).values.tolist())
    aside.call("pictures", [file for file in pictures if file.suffix == ".png"])
    aside.finish(True)


def former(folder: Path) -> list[Event]:
    """Steps and evaluations in a folder, in order; of several attempts at a step, the last. Empty if unreadable."""
    try:
        events = read_events(folder / METRICS)
    except (OSError, ValueError):
        return []
    known = [event for event in events if event["event"] in ("step", "eval")]
    last = {(int(event["step"]), event["event"] == "eval"): event for event in known}
    return [last[key] for key in sorted(last)]


def _beside(config: Config, shown: Shown) -> Aside:
    patience_s = getattr(config.tracker, "timeout_s", None) or PATIENCE_S
    return Aside(config.tracker.title, patience_s, partial(config.tracker.mirror, shown))


def _id(folder: Path, kind: str, own: str, *, goes_on: bool) -> str:
    """A tracker's id for a run. A run that begins gets `own` and 8 random digits, so that it overwrites no other run. A
    run that continues in its folder keeps its id."""
    try:
        known = dict(json.loads((folder / _IDS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if not (goes_on and str(known.get(kind, "")).rpartition("-")[0] == own):
        known[kind] = f"{own}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):  # the next attempt is a new run for the tracker
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _IDS).write_text(json.dumps(known), encoding="utf-8")
    return str(known[kind])
