"""status.json of a run: the identity of its job, its state, and how it ended. `experiments.job.sweep` reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.config.checks import as_mapping
from experiments.config.identity import code_of
from experiments.config.schema import Config
from experiments.job import profiles
from mdcs.planner.recompute import KEEP

FILE = "status.json"
SCHEMA = 1
SUBMITTED, RUNNING, OK, FAILED, INTERRUPTED, PREEMPTED = "submitted", "running", "ok", "failed", "interrupted", "preempted"

_NOT_OF_A_JOB = {
    "tracker": None, "sweep": None, "batch": None, "paths": None, "profile": ("path", "cache", "refresh"),
    "run": ("sweep", "resume", "varied"),
}  # fmt: skip
"""Groups (None: all keys) and keys that may differ between runs of one job."""

_CODE_OF = ("model", "data", "optimizer", "strategy", "scheduler", "engine")
"""Groups whose class's code is part of the identity. `code_of` does not cover classes of `mdcs`."""


@dataclass(frozen=True)
class Record:
    """The record of a run.

    - identity: of its job (`identity_of`).
    - state: submitted, running, ok, failed, interrupted or preempted. A killed run stays running.
    - reason: one line; empty if ok.
    - time (s): unix time.
    - doubt: reason why the predictions of a run that is ok are not reliable.
    """

    identity: str
    state: str
    reason: str = ""
    time: float = field(default_factory=time.time)
    doubt: str = ""


def identity_of(config: Config, launcher: Mapping[str, Any] | None = None) -> str:
    """The identity of a job, 20 hexadecimal digits. Runs of one job have the same.

    It is a hash of the config without paths and trackers, with the machine's part of the profile's identity, the
    contents of the model's files, and the code of the chosen classes.

    launcher: settings of a launcher that submits jobs, as far as measurements depend on them. SLURM's nodes are other
    machines than this one, so this machine's properties are left out then.
    """
    code = {group: code_of(type(getattr(config, group))) for group in _CODE_OF}
    told = as_mapping(config) | {"made_of": config.model.made_of, "code": code}
    if config.recompute == KEEP:  # runs from before have the same identity
        del told["recompute"]
    if plan := told["engine"].get("plan"):
        told["engine"]["plan"] = _hash(plan)
    for group, keys in _NOT_OF_A_JOB.items():
        for key in (*told[group],) if keys is None else keys:
            del told[group][key]
    path, elsewhere = config.profile.path, launcher is not None
    profile = profiles.key_of(config, elsewhere=elsewhere) if path is None else _hash(path)
    parts = [told, profile, *([] if launcher is None else [dict(launcher)])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write(folder: Path, identity: str, state: str, reason: str = "", *, doubt: str = "") -> None:
    """Write the record into the folder, atomically."""
    record = Record(identity, state, reason, doubt=doubt)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1), encoding="utf-8")
    part.replace(folder / FILE)


def read(folder: Path) -> Record | None:
    """The record of the folder's last run; None if there is none, or if it cannot be read."""
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if said.pop("schema") != SCHEMA:
            return None
        return Record(**said)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
