"""Where a run's metrics go: metrics.jsonl, the truth, which is always written, and a tracker beside it if a config says so.

Rank 0 writes one JSON object per line, flushed per line, so a killed run can be read to its last step
(`JsonLines`). The parent process, which follows that file anyway to show progress (`analysis.events.Tail`), shows it to
the config's tracker (`Follower`). So a tracker takes no time and no memory in a rank, sees failed runs too, and cannot stop
a run: its first failure is one warning, and then it is left alone.
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
from typing import Any

import pandas as pd

import analysis
from analysis.events import METRICS, read_events
from experiments.config.checks import as_mapping
from experiments.config.identity import sweep_hash
from experiments.config.schema import Config
from experiments.trackers.aside import Aside
from experiments.trackers.tracker import Event, Shown

_DOCUMENTS = ("profile", "plan")
_IDS = "tracked_as.json"
"""In a folder: which run of a tracker its run is, by kind."""
_TABLE = (
    "name", "model", "strategy", "scheduler", "engine", "world", "budget_gib", "schedule_share", "status", "step_s",
    "predicted_step_s", "overlap_ratio", "exposed_s", "stalled_s", "peak_bytes", "throughput_samples_s", "plan_hash",
)  # fmt: skip
"""Columns of a sweep's table that a tracker is shown, with the settings that were swept."""


class JsonLines:
    """Appends events to a file, each on a line of its own, at once; for one writer at a time.

    A number that is not finite becomes null, as JSON has no other word for it. A line that an earlier
    writer left unfinished, because it was killed, is removed; one that does not fit on the disk is not begun. Raises
    OSError, naming the file, when it cannot be written.
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


# ---- the tracker beside it


class Follower:
    """Shows a run to its config's tracker: events as they come, then its files. Never raises, and never waits but at the end.

    kind: profile, plan, train or compare. identity: of the job as it was asked for (`experiments.job.record`). The steps and
    evaluations that the folder has of former attempts are shown before the first step that goes on from them.
    """

    def __init__(self, config: Config, folder: Path, kind: str, identity: str) -> None:
        self._folder, self._aside = folder, None
        self._past = former(folder) if config.tracker.shows else []
        if config.tracker.shows:
            self._aside = _beside(config, _shown(config, folder, kind, identity))

    def event(self, event: Event) -> None:
        if self._aside is None:
            return
        if event["event"] == "resumed" and self._folder.resolve() not in Path(event["folder"]).parents:
            self._past = []  # another run's
        if event["event"] == "step" and self._past:
            earlier = [past for past in self._past if past["step"] < event["step"]]
            self._past = []
            self._aside.call("past", earlier)
        self._aside.call("event", event)

    def pictures(self, files: Sequence[Path]) -> None:
        if self._aside is not None:
            self._aside.call("pictures", files)

    def finish(self, ok: bool) -> None:
        """The profile and the plan that are in the folder by now, and the end."""
        if self._aside is not None:
            for kind in _DOCUMENTS:
                if (file := self._folder / f"{kind}.json").is_file():
                    self._aside.call("document", kind, file)
            self._aside.finish(ok)


def show_files(config: Config, folder: Path, kind: str, identity: str) -> None:
    """Show what a folder has of a job for which no ranks were started: its "profile" or its "plan"."""
    Follower(config, folder, kind, identity).finish(True)


def show_sweep(config: Config, sweep: str, folder: Path, frame: pd.DataFrame, pictures: Sequence[Path]) -> None:
    """Show a sweep's table and pictures to the tracker of one of its jobs, by the group that all of its runs are in."""
    if not config.tracker.shows:
        return
    group = sweep_hash(sweep)
    own = _id(folder, "sweep", f"sweep-{group}", goes_on=not config.sweep.force)
    aside = _beside(config, Shown(folder, own, sweep, group, "sweep", {}))
    columns = (*_TABLE, *analysis.swept(frame))
    rows = frame[list(columns)].astype(object)
    aside.call("table", columns, rows.where(rows.notna(), None).values.tolist())
    aside.call("pictures", [file for file in pictures if file.suffix == ".png"])
    aside.finish(True)


def former(folder: Path) -> list[Event]:
    """A folder's steps, each with its evaluation, of several attempts the last; none where its file cannot be read."""
    try:
        events = read_events(folder / METRICS)
    except (OSError, ValueError):
        return []
    last = {(int(event["step"]), event["event"] == "eval"): event for event in events if event["event"] in ("step", "eval")}
    return [last[key] for key in sorted(last)]


def _beside(config: Config, shown: Shown) -> Aside:
    return Aside(config.tracker.title, config.tracker.patience_s, partial(config.tracker.mirror, shown))


def _shown(config: Config, folder: Path, kind: str, own: str) -> Shown:
    if kind != "train":
        own += f"-{kind}"
    if kind == "compare":  # equal jobs take turns
        own += "-" + re.sub(r"[^A-Za-z0-9.-]+", "-", folder.name)
    own = _id(folder, kind, own, goes_on=bool(config.run.resume))
    group = None if config.run.sweep is None else sweep_hash(config.run.sweep)
    return Shown(folder, own, str(config.run.name), group, kind, as_mapping(config))


def _id(folder: Path, kind: str, own: str, *, goes_on: bool) -> str:
    """A tracker's id for a run that begins: `own` and 8 digits that no other has, so that it overwrites none. One that goes on in
    its folder keeps the id that it has there.
    """
    try:
        known = dict(json.loads((folder / _IDS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        known = {}
    if not (goes_on and str(known.get(kind, "")).rpartition("-")[0] == own):
        known[kind] = f"{own}-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):  # the run begins anew the next time, to the tracker
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _IDS).write_text(json.dumps(known), encoding="utf-8")
    return str(known[kind])
