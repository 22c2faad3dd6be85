"""Runs as one table, wherever they are: folders, or W&B's projects through its API; and reports on W&B's server.

`experiments/job/tracking.py` says what W&B is sent: the job and start events as config, a row of history per step, and
the rest as summary, nested keys joined by "/". Steps' keys may begin with `train/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pandas as pd
import yaml

from analysis.load import Run, load_runs, table_of

WANDB = "wandb:"
_KEYS = {"train/loss_rank0": "loss"}


def runs(source: str | Path) -> pd.DataFrame:
    """One row per run, with :data:`analysis.load.COLUMNS` and the settings in which runs differ; times in seconds,
    sizes in bytes.

    `source` is the folder of a sweep or of a run, at any depth, or `wandb:ENTITY/PROJECT[/GROUP]` (a sweep is a group),
    asked of W&B with this machine's account. Raises FileNotFoundError if a folder does not exist, ValueError if there
    are no runs, or what W&B says.
    """
    return table_of([run.row() for run in _found(source)])


def steps(source: str | Path) -> pd.DataFrame:
    """One row per step of every run, in long form, for the sources of :func:`runs`.

    After what tells the run (`_OF_RUN`, and the settings in which runs differ) come the columns of the step's event:
    seconds and bytes; `bytes` and `messages` by kind, as `bytes_AG_F`.
    """
    found = _found(source)
    table = table_of([run.row() for run in found])
    about = table[[*_OF_RUN, *(key for key in table if "." in key)]]
    made = [step | {"run": number} for number, run in enumerate(found) for step in run.steps.to_dict("records")]
    if not made:
        return about.head(0)
    steps = pd.json_normalize(made, sep="_").drop(columns="event", errors="ignore")
    return about.merge(steps, left_index=True, right_on="run", suffixes=("", "_"))


_OF_RUN = ("name", "folder", "model", "strategy", "scheduler", "engine", "budget_bytes", "schedule_share")


def _found(source: str | Path) -> list[Run]:
    if not str(source).startswith(WANDB):
        return load_runs(source)
    entity, project, group, *_ = [*str(source).removeprefix(WANDB).split("/", 2), "", ""]
    if not (entity and project):
        raise ValueError(f"{source}: expected {WANDB}ENTITY/PROJECT or {WANDB}ENTITY/PROJECT/GROUP")
    found = project_runs(f"{entity}/{project}", group or None)
    if not found:
        raise ValueError(f"{source} has no runs")
    return found


def project_runs(project: str, group: str | None = None, *, api: Any = None) -> list[Run]:
    """The runs of a project, `ENTITY/NAME`, or of one group (a sweep) in it, the oldest first. `api`: a `wandb.Api`, by
    default that of this machine's account.

    Raises ModuleNotFoundError without the wandb package, ValueError with what W&B says if it refuses.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("runs of W&B need its package: pip install wandb") from error
    try:
        api = api or wandb.Api()
        found = api.runs(project, filters={"group": group} if group else {}, order="+created_at")
        return [_run(run) for run in found]
    except wandb.Error as error:
        raise ValueError(f"W&B, {project}: {error}") from error


def _run(run: Any) -> Run:
    """A run of W&B as :func:`analysis.load.load_run` has it."""
    rows = [nested({_KEYS.get(key, key.removeprefix("train/")): value for key, value in row.items()
                    if not key.startswith("predicted/")}) for row in run.scan_history()]  # fmt: skip
    config, last = dict(run.config), nested(dict(run.summary))
    status = last.get("status")
    return Run(
        folder=Path(run.url or run.name),
        start=(config.get("job") or {}) | (config.get("start") or {}),
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


# ---- reports, which only W&B's server keeps


class Group(NamedTuple):
    """A sweep's runs on W&B's server. entity None: the account's own."""

    entity: str | None
    project: str
    group: str


def group_of(source: str, *, api: Any = None) -> Group:
    """The group that a source names: a sweep's folder, the address of a group or a run, or wandb:ENTITY/PROJECT/GROUP.

    api: a `wandb.Api`, by default that of this machine's account; asked only for the group of a run. Raises ValueError.
    """
    if source.startswith(("http:", "https:", WANDB)):
        match urlsplit(source).path.strip("/").split("/"):
            case [entity, project, "groups", group, *_] if not source.startswith(WANDB):
                return Group(entity, project, group)
            case [entity, project, "runs", run, *_] if not source.startswith(WANDB):
                if found := (api or _api()).run(f"{entity}/{project}/{run}").group:
                    return Group(entity, project, found)
                raise ValueError(f"{source} belongs to no sweep")
            case [entity, project, group] if source.startswith(WANDB) and all((entity, project, group)):
                return Group(entity, project, group)
        address = "https://HOST/ENTITY/PROJECT/groups/GROUP, or the address of a sweep's run"
        raise ValueError(f"{source}: expected {WANDB}ENTITY/PROJECT/GROUP, {address}")
    try:
        own = json.loads((Path(source) / "tracked_as.json").read_text(encoding="utf-8"))["sweep"]
        files = sorted(Path(source).glob("*/config.yaml"))
        trackers = (yaml.safe_load(file.read_text(encoding="utf-8")).get("tracker") or {} for file in files)
        config = next(each for each in trackers if "project" in each)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise ValueError(f"{source} is not the folder of a sweep with tracker=wandb that has ended") from error
    own_group = str(own).removeprefix("sweep-").rpartition("-")[0]
    return Group(config["entity"], config["project"], config["group"] or own_group)


def write_wandb_report(source: str, *, api: Any = None) -> str:
    """Write a report of a sweep's online runs: step time over budget, curves beside predictions, the table. Return its
    address. Needs wandb-workspaces. Raises ValueError, also with what W&B says if it refuses."""
    import wandb

    try:
        api = api or _api()
        entity, project, group = group_of(source, api=api)
        entity = entity or api.default_entity
        if not len(api.runs(f"{entity}/{project}", filters={"group": group})):
            send = "wandb sync FOLDER/*/wandb/offline-run-*"
            raise ValueError(f"{entity}/{project} has no runs of {group}; offline runs are sent by {send}")
        return _write_report(entity, project, group)
    except wandb.Error as error:
        raise ValueError(f"W&B: {error}") from error


def _api() -> Any:
    import wandb

    return wandb.Api()


def _write_report(entity: str, project: str, group: str) -> str:
    import wandb_workspaces.reports.v2 as reports

    def runs(kind: str) -> Any:
        chosen = f"Group == '{group}' and JobType == '{kind}'"
        return reports.Runset(entity=entity, project=project, name=kind, filters=chosen)

    def lines(title: str, name: str) -> Any:
        return reports.LinePlot(title=title, x="train/step", y=[f"train/{name}", f"predicted/{name}"])

    def points(title: str, over: str, name: str) -> Any:
        return reports.ScatterPlot(title=title, x=reports.Config(over), y=reports.SummaryMetric(name))

    panels: list[Any] = [
        points("step time over budget", "start.budget_bytes", "step_s/median"),
        points("step time over predicted", "start.predicted.step_s", "step_s/median"),
        points("overlap over share of the schedule", "job.schedule_share", "overlap_ratio"),
        lines("step time", "step_s"), lines("exposed communication", "exposed_s"),
        lines("overlap ratio", "overlap_ratio"),
    ]  # fmt: skip
    grids = {"train": panels, "sweep": [reports.WeavePanelSummaryTable(table_name="runs")]}
    blocks: list[Any] = [reports.PanelGrid(runsets=[runs(kind)], panels=of) for kind, of in grids.items()]
    made = reports.Report(entity=entity, project=project, title=group, blocks=blocks)
    made.save()
    return str(made.url)
