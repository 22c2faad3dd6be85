"""metrics.jsonl, the events of a run: a JSON object per line, appended and flushed as they happen.

`job` comes first, written before any process starts: what was asked for. Then `start` (the plan and its prediction), a
`step` each, `eval`s, `checkpoint`s, and a `summary` or a `failure`. A run that was killed leaves what it had, perhaps
half a last line.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
SCHEMA = 3
"""Schema of the `job` event."""

Event = dict[str, Any]


def read_events(path: Path) -> list[Event]:
    """All events of a file, those of several attempts included. Half a last line is left out, with a warning.

    Raises FileNotFoundError, and ValueError naming any other line that is no event.
    """
    lines = path.read_bytes().rstrip(b"\n").split(b"\n")
    events = {number: _event(line) for number, line in enumerate(lines, start=1) if line.strip()}
    for number, event in events.items():
        if event is None and number < max(events):
            raise ValueError(f"{path.name}, line {number}: not a JSON object with an event")
        if event is None:
            warnings.warn(f"{path}: the last line is cut off, and left out", stacklevel=2)
    return [event for event in events.values() if event is not None]


def last_attempt(events: Sequence[Event]) -> list[Event]:
    """The events of the last job that ran in a folder. Raises ValueError for another schema."""
    first = max((i for i, event in enumerate(events) if event["event"] == "job"), default=None)
    if first is not None and (schema := events[first].get("schema")) != SCHEMA:
        raise ValueError(f"{METRICS} has schema {schema}, this version reads schema {SCHEMA}")
    return list(events[first:])


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
