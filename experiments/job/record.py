"""status.json of a run: which job it is of, how far it is and how it has ended; `experiments.job.earlier` reads it."""

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
from experiments.config.code import code_of
from experiments.config.schema import Config
from experiments.job import profiles
from launch import status

FILE = "status.json"
SCHEMA = 1
HANDED_IN, RUNNING, OK, FAILED, INTERRUPTED, PREEMPTED = "handed in", "running", "ok", "failed", "interrupted", "preempted"

_NOT_OF_A_JOB = {"tracker": None, "sweep": None, "profile": ("path", "cache", "refresh"), "run": ("sweep", "resume", "varied")}
"""What may differ between runs of one job: whole groups, and keys of groups."""

_CODE_OF = ("model", "data", "optimizer", "strategy", "scheduler", "engine")
"""Groups of which the class's code belongs to a run; `mdcs` has none there."""


@dataclass(frozen=True)
class Record:
    """`ranks` has what each rank last said (`launch.status`), `time` is unix time in seconds, `doubt` why the
    predictions of a run that is ok are not to be believed. A killed run stays running.
    """

    identity: str
    state: str
    reason: str = ""
    ranks: tuple[dict[str, Any], ...] = ()
    time: float = field(default_factory=time.time)
    doubt: str = ""


def identity_of(config: Config, launcher: Mapping[str, Any] | None = None) -> str:
    """What two runs of one job have in common, 20 hexadecimal digits: the hash of the config, with what this machine decides of
    the profile, what the model is made of and the code of the classes that are chosen, and without paths and trackers.

    launcher: what the launcher that hands the job in is told and its measurement depends on. SLURM's nodes are other machines
    than this one, which then decides nothing.
    """
    code = {group: code_of(type(getattr(config, group))) for group in _CODE_OF}
    told = as_mapping(config) | {"made_of": config.model.made_of, "code": code}
    if plan := told["engine"].get("plan"):
        told["engine"]["plan"] = _hash(plan)
    for group, keys in _NOT_OF_A_JOB.items():
        for key in (*told[group],) if keys is None else keys:
            del told[group][key]
    path, elsewhere = config.profile.path, launcher is not None and launcher["executor"] != "local"
    profile = profiles.key_of(config, elsewhere=elsewhere) if path is None else _hash(path)
    parts = [told, profile, *([] if launcher is None else [dict(launcher)])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def _hash(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def write(folder: Path, identity: str, state: str, reason: str = "", *, ranks: int = 0, doubt: str = "") -> None:
    """Leave it in the folder, whole; of so many ranks what each has said there."""
    said = (status.read(folder, rank) for rank in range(ranks))
    record = Record(identity, state, reason, tuple(dataclasses.asdict(each) for each in said if each is not None), doubt=doubt)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    part.write_text(json.dumps({"schema": SCHEMA, **dataclasses.asdict(record)}, indent=1), encoding="utf-8")
    part.replace(folder / FILE)


def read(folder: Path) -> Record | None:
    """That of the folder's last run; None where there is none that can be read."""
    try:
        said = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if said.pop("schema") != SCHEMA:
            return None
        return Record(**said | {"ranks": tuple(said["ranks"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
