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
from experiments.config.identity import code_of, identity, job_identity
from experiments.config.schema import Config
from experiments.job import profiles

FILE = "status.json"
PARTS = "identity.json"  # File in a run's folder: the parts of its identity, by name. It says why a job runs again.
SCHEMA = 1
SUBMITTED, RUNNING, OK, FAILED = "submitted", "running", "ok", "failed"
INTERRUPTED, PREEMPTED = "interrupted", "preempted"
INFEASIBLE = "infeasible"  # state of a job of which no plan keeps the budget
Parts = dict[str, Any]
_CONFIG = "config"
_NOT_OF_A_JOB = {
    "tracker": None, "sweep": None, "batch": None, "paths": None, "profile": ("path", "cache", "refresh"),
    "run": ("sweep", "resume", "varied"),
}  # fmt: skip
"""Groups (None: all keys) and keys that may differ between runs of one job."""

_CODE_OF = ("model", "data", "optimizer", "strategy", "scheduler", "engine")
"""Groups whose class's code is part of the identity. `code_of` does not cover classes of `mdcs`."""


@dataclass(frozen=True)
class Record:
    """The record of a run."""

    identity: str  # of its job (`identity_of`)
    state: str  # submitted, running, ok, failed, infeasible, interrupted or preempted; a killed run stays running
    reason: str = ""  # one line; empty if ok
    time: float = field(default_factory=time.time)  # unix time
    doubt: str = ""  # reason why the predictions of a run that is ok are not reliable


def identity_of(config: Config) -> str:
    """The identity of a job of no launcher. Runs of one job have the same."""
    return hash_of(parts_of(config))


def hash_of(parts: Parts) -> str:
    """The identity of a job, 20 hexadecimal digits, from its parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def parts_of(config: Config, launcher: Mapping[str, Any] | None = None) -> Parts:
    """The parts of a job's identity, by name: under ``config`` the config without paths and trackers, then the code of
    the chosen classes, the contents of the model's files, the machine, and the libraries.

    launcher: settings of a launcher that submits jobs, as far as measurements depend on them. SLURM's nodes are other
    machines than this one, so this machine's properties are left out then.
    """
    told = as_mapping(config)
    if plan := told["engine"].get("plan"):
        told["engine"]["plan"] = _hash(plan)
    for group, keys in _NOT_OF_A_JOB.items():
        for key in (*told[group],) if keys is None else keys:
            del told[group][key]
    parts: Parts = {_CONFIG: told}
    parts |= {f"code of the {group}": code_of(type(getattr(config, group))) for group in _CODE_OF}
    parts |= {f"model.{name}": made for name, made in config.model.made_of.items()}
    if config.profile.path is None:
        of_job, elsewhere = job_identity(config), launcher is not None
        parts |= {name: value for name, value in identity(config, elsewhere=elsewhere).items() if name not in of_job}
        parts["the way of measuring"] = profiles.key_of(config, elsewhere=elsewhere)
    else:
        parts["profile.path"] = _hash(config.profile.path)
    return parts | {f"hydra.launcher.{name}": value for name, value in (launcher or {}).items()}


def changed(before: Parts, now: Parts) -> list[str] | None:
    """Names of the parts in which the identities of two runs of one config differ; None for other configs."""
    if before.get(_CONFIG) != now[_CONFIG]:
        return None
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return [name for name in names if name != "the way of measuring"] or names


def write_parts(folder: Path, parts: Parts) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PARTS).write_text(json.dumps(parts, indent=1), encoding="utf-8")


def read_parts(folder: Path) -> Parts:
    """The parts of the identity of the folder's run. Empty if they cannot be read."""
    try:
        parts = json.loads((folder / PARTS).read_text(encoding="utf-8"))
        return parts if isinstance(parts, dict) else {}
    except (OSError, ValueError):
        return {}


def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write(folder: Path, identity: str, state: str, reason: str = "", *, doubt: str = "") -> None:
    """Write the record into the folder, atomically."""
    told = {"schema": SCHEMA, **dataclasses.asdict(Record(identity, state, reason, doubt=doubt))}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps(told, indent=1), encoding="utf-8")
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
