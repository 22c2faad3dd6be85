"""metrics.jsonl, the events of a run: a JSON object per line, appended and flushed as they happen.

`job` comes first, written before any process starts: what was asked for. Then `start` (the plan and its prediction), a `step`
each, `eval`s, `checkpoint`s, and a `summary` or a `failure`. A run that was killed leaves what it had, perhaps half a last line.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mdcs.plan.strategy import RENAMED_IN_FILES
from mdcs.plan.times import StepTimes

METRICS = "metrics.jsonl"
SCHEMA = 3
"""Schema of the `job` event; files without one are of schema 1."""

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """All events of a file, those of several attempts included. Half a last line is left out, with a warning.

    Raises FileNotFoundError, and ValueError naming any other line that is no event.
    """
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    events = [(number, _event(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    corrupt = next((number for number, event in events[:-1] if event is None), None)
    if corrupt is not None:
        raise ValueError(f"{path.name}, line {corrupt}: not a JSON object with an event")
    if events and events[-1][1] is None:
        warnings.warn(f"{path}: the last line is cut off, and left out", stacklevel=2)
    return [event for _, event in events if event is not None]


def last_attempt(events: Sequence[Event]) -> list[Event]:
    """The events of the last job that ran in a folder, in the words of this version. Raises ValueError for a newer schema."""
    first = max((i for i, event in enumerate(events) if event["event"] == "job"), default=None)
    schema = 1 if first is None else events[first].get("schema")
    if schema == SCHEMA:
        return list(events[first:])
    events = [_renamed(event) for event in events]
    if schema == 2:
        return events[first:]
    if schema != 1:
        raise ValueError(f"{METRICS} has schema {schema}, this version reads schema {SCHEMA}")
    first = max((i for i, event in enumerate(events) if event["event"] == "start"), default=0)
    return [_translated(event) for event in events[first:]]


class Tail:
    """Reads what has been appended to an event file since the last look; lines that are no events are left out."""

    def __init__(self, path: Path) -> None:
        self._path, self._position, self._rest = path, 0, b""

    def new(self) -> list[Event]:
        """The events of the lines finished since the last call; none while the file does not exist."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [event for line in lines if (event := _event(line)) is not None]


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _renamed(event: Event) -> Event:
    """An event of schema 1 or 2, with the names that strategies have now."""
    event = event | {"strategy": _name(event["strategy"])} if "strategy" in event else event
    if settings := event.get("settings"):
        event |= {"settings": {k: _name(v) if k.startswith("strategy.") else v for k, v in settings.items()}}
    if tried := event.get("tried"):
        event |= {"tried": [each | {"strategy": _name(each["strategy"])} for each in tried]}
    return event


def _name(strategy: Any) -> Any:
    return RENAMED_IN_FILES.get(strategy, strategy) if isinstance(strategy, str) else strategy


def _translated(event: Event) -> Event:
    """An event of schema 1, where `exposed_s` was all time in which computing does not run: what is now `stalled_s`."""
    match event:
        case {"event": "step", "step_s": _}:
            return event | asdict(StepTimes.from_dict(event))
        case {"event": "start", "predicted": {"step_s": _} as predicted}:
            return event | {"predicted": predicted | asdict(StepTimes.from_dict(predicted))}
        case {"event": "summary", "exposed_s": stalled_s}:
            return {key: value for key, value in event.items() if key != "exposed_s"} | {"stalled_s": stalled_s}
    return event
