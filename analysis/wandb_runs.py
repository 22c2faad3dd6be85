"""Runs as W&B has them: files of offline runs, and projects through its API.

`experiments/job/tracking.py` says what is sent: the job and start events as config, a row of history per step, and the rest as
summary, nested keys joined by "/". Steps' keys may begin with `train/`.
"""

from __future__ import annotations

import importlib
import json
import struct
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from analysis.load import Run

_KEYS = {"train/loss_rank0": "loss"}
_HEADER = 7  # bytes of a .wandb file before its first block
_BLOCK = 32 * 1024
_FRAME = struct.Struct("<IHB")  # checksum, length, and which part of a record: whole, first, middle or last
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def offline_runs(folder: str | Path) -> list[Run]:
    """The runs of all `.wandb` files at or below `folder`, in the order of their names; empty if there are none.

    Raises ModuleNotFoundError without the wandb package.
    """
    return [_offline_run(path) for path in sorted(Path(folder).rglob("*.wandb"))]


def project_runs(project: str, group: str | None = None, *, api: Any = None) -> list[Run]:
    """The runs of a project, `ENTITY/NAME`, or of one group (a sweep) in it, through W&B's API, the oldest first.

    `api` is a `wandb.Api`, by default that of this machine's account. Raises ModuleNotFoundError without the wandb
    package, ValueError with what W&B says if it refuses.
    """
    wandb = _wandb()
    try:
        api = api or wandb.Api()
        found = api.runs(project, filters={"group": group} if group else {}, order="+created_at")
        return [
            _run(Path(run.url or run.name), dict(run.config), list(run.scan_history()), dict(run.summary)) for run in found
        ]
    except wandb.Error as error:
        raise ValueError(f"W&B, {project}: {error}") from error


def _wandb() -> ModuleType:
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("runs of W&B need its package: pip install wandb") from error
    return wandb


def _offline_run(path: Path) -> Run:
    _wandb()
    form: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for data in _records(path):
        record = form.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            config |= _values(record.run.config.update)
        elif kind == "config":
            config |= _values(record.config.update)
        elif kind == "history":
            history.append(_values(record.history.item))
        elif kind == "summary":
            summary |= _values(record.summary.update)
    return _run(path.parent, config, history, summary)


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(path: Path) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format; the one that a killed run has left half is left out, with a warning."""
    data, at, parts = path.read_bytes(), _HEADER, b""
    while at + _FRAME.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _FRAME.size:
            at += left
            continue
        _, length, part = _FRAME.unpack_from(data, at)
        at += _FRAME.size
        if not _WHOLE <= part <= _LAST or at + length > len(data):
            break
        parts = data[at : at + length] if part in (_WHOLE, _FIRST) else parts + data[at : at + length]
        at += length
        if part in (_WHOLE, _LAST):
            yield parts
            parts = b""
    if at < len(data) or parts:
        warnings.warn(f"{path}: the end is cut off, and left out", stacklevel=2)


def _run(folder: Path, config: Mapping[str, Any], history: list[dict[str, Any]], summary: Mapping[str, Any]) -> Run:
    """A run as :func:`analysis.load.load_run` has it: `config` has its job and start events."""
    rows = [nested({_KEYS.get(key, key.removeprefix("train/")): value for key, value in row.items()
                    if not key.startswith("predicted/")}) for row in history]  # fmt: skip
    last = nested(summary)
    status = last.get("status")
    return Run(
        folder=folder,
        start={**(config.get("job") or {}), **(config.get("start") or {})},
        steps=pd.DataFrame([row for row in rows if "step_s" in row]),
        summary=last if status == "ok" else {},
        failure=last if status == "failed" else {},
    )


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys with "/" as mappings again. Where a key is both (`step_s`, and `step_s/median`), the mapping stays."""
    made: dict[str, Any] = {}
    for key, value in sorted(values.items(), key=lambda item: item[0].count("/")):
        at = made
        *path, name = key.split("/")
        for part in path:
            inner = at.get(part)
            at[part] = at = inner if isinstance(inner, dict) else {}
        at[name] = value
    return made
