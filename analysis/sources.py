"""Runs as one table, wherever they are: folders, or W&B's projects through its API.

`experiments/job/tracking.py` says what W&B is sent: the job and start events as config, a row of history per step, and
the rest as summary, nested keys joined by "/". Steps' keys may begin with `train/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.load import Run, load_runs, table_of

WANDB = "wandb:"
_KEYS = {"train/loss_rank0": "loss"}


def runs(source: str | Path) -> pd.DataFrame:
    """One row per run, with :data:`analysis.load.COLUMNS` and the settings in which runs differ; times in seconds,
    sizes in bytes.

    `source` is one of

    - the folder of a sweep or of a run, as `train.py` wrote it, at any depth;
    - `wandb:ENTITY/PROJECT` or `wandb:ENTITY/PROJECT/GROUP` (a sweep is a group): asked of W&B, with this machine's
      account.

    Raises FileNotFoundError if a folder does not exist, ValueError if there are no runs, or what W&B says.
    """
    return table_of([run.row() for run in _found(source)])


def steps(source: str | Path) -> pd.DataFrame:
    """One row per step of every run, in long form, for the sources of :func:`runs`.

    Its columns are those of the step's event (seconds and bytes; `bytes` and `messages` by kind, as `bytes_AG_F`),
    after the run's `name`, `folder`, `model`, `strategy`, `scheduler`, `engine`, `budget_bytes`, `schedule_share`, and
    the settings in which runs differ.
    """
    found = _found(source)
    table = table_of([run.row() for run in found])
    about = [*_OF_RUN, *(key for key in table if "." in str(key))]
    made = [
        pd.json_normalize(run.steps.to_dict("records"), sep="_").drop(columns="event", errors="ignore")
        .assign(run=number) for number, run in enumerate(found) if len(run.steps)
    ]  # fmt: skip
    if not made:
        return table[about].head(0)
    return table[about].merge(pd.concat(made, ignore_index=True), left_index=True, right_on="run", suffixes=("", "_"))


_OF_RUN = ("name", "folder", "model", "strategy", "scheduler", "engine", "budget_bytes", "schedule_share")


def _found(source: str | Path) -> list[Run]:
    """All runs of a source."""
    if not str(source).startswith(WANDB):
        return load_runs(source)
    entity, slash, rest = str(source).removeprefix(WANDB).partition("/")
    project, _, group = rest.partition("/")
    if not (entity and slash and project):
        raise ValueError(f"{source}: expected {WANDB}ENTITY/PROJECT or {WANDB}ENTITY/PROJECT/GROUP")
    found = project_runs(f"{entity}/{project}", group or None)
    if not found:
        raise ValueError(f"{source} has no runs")
    return found


def project_runs(project: str, group: str | None = None, *, api: Any = None) -> list[Run]:
    """The runs of a project, `ENTITY/NAME`, or of one group (a sweep) in it, through W&B's API, the oldest first.

    `api` is a `wandb.Api`, by default that of this machine's account. Raises ModuleNotFoundError without the wandb
    package, ValueError with what W&B says if it refuses.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("runs of W&B need its package: pip install wandb") from error
    try:
        api = api or wandb.Api()
        found = api.runs(project, filters={"group": group} if group else {}, order="+created_at")
        return [
            _run(Path(run.url or run.name), dict(run.config), list(run.scan_history()), dict(run.summary))
            for run in found
        ]
    except wandb.Error as error:
        raise ValueError(f"W&B, {project}: {error}") from error


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
        failure=last if status in ("failed", "infeasible") else {},
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
