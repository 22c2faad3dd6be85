"""Reads back what W&B has written offline: a log of LevelDB's format whose records are protocol buffers."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER, _BLOCK, _FULL, _LAST = 7, 32768, 1, 4


def records(file: Path) -> Iterator[Any]:
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _HEADER
        whole += data[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def whole(file: Path) -> list[Any]:
    """The records of a run that has ended: W&B's own process may still be writing."""
    deadline = time.monotonic() + 120
    while not (found := list(records(file))) or found[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end"
        time.sleep(0.02)
    return found


class Read:
    """The one run that is in a folder."""

    def __init__(self, folder: Path) -> None:
        [file] = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.artifacts: dict[str, tuple[str, list[str], bool]] = {}
        """By type: name, files, and whether the run uses it."""
        self.metrics: dict[str, str] = {}
        self.exit_code: int | None = None
        self.environment: list[Any] = []
        self.kinds: set[str] = set()
        for record in whole(file):
            self.kinds.add(record.WhichOneof("record_type"))
            match record.WhichOneof("record_type"):
                case "run":
                    self.run = record.run
                    self.config |= values(record.run.config.update)
                case "config":
                    self.config |= values(record.config.update)
                case "history":
                    self.history.append(values(record.history.item))
                case "summary":
                    self.summary |= values(record.summary.update)
                case "metric":
                    self.metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
                case "artifact":
                    made = record.artifact
                    files = [entry.path for entry in made.manifest.contents]
                    self.artifacts[made.type] = made.name, files, made.use_after_commit
                case "environment":
                    self.environment.append(record.environment)
                case "exit":
                    self.exit_code = record.exit.exit_code


def values(items: Any) -> dict[str, Any]:
    """By key, parts of nested ones joined by a dot."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
