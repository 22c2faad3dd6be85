"""Reports of sweeps on W&B's server, which is the only place where W&B keeps reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

from analysis.sources import WANDB

_STEP = "train/step"


class Group(NamedTuple):
    """A sweep's runs on W&B's server. entity None: the account's own."""

    entity: str | None
    project: str
    group: str


def group_of(source: str, *, api: Any = None) -> Group:
    """The group that a source names: a sweep's folder, the address of a group or a run, or wandb:ENTITY/PROJECT/GROUP.

    api: a `wandb.Api`, by default that of this machine's account; asked only for the group of a run. Raises ValueError.
    """
    if (address := urlsplit(source)).scheme in ("http", "https"):
        match address.path.strip("/").split("/"):
            case [entity, project, "groups", group, *_]:
                return Group(entity, project, group)
            case [entity, project, "runs", run, *_]:
                found = (api or _api()).run(f"{entity}/{project}/{run}").group
                if not found:
                    raise ValueError(f"{source} belongs to no sweep")
                return Group(entity, project, found)
        raise ValueError(
            f"{source}: expected https://HOST/ENTITY/PROJECT/groups/GROUP, or the address of a sweep's run"
        )
    if source.startswith(WANDB):
        parts = source.removeprefix(WANDB).split("/")
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"{source}: expected {WANDB}ENTITY/PROJECT/GROUP")
        return Group(*parts)
    try:
        own = json.loads((Path(source) / "tracked_as.json").read_text(encoding="utf-8"))["sweep"]
        files = sorted(Path(source).glob("*/config.yaml"))
        trackers = (yaml.safe_load(file.read_text(encoding="utf-8")).get("tracker") or {} for file in files)
        config = next(each for each in trackers if "project" in each)
    except (OSError, ValueError, KeyError, StopIteration) as error:
        raise ValueError(f"{source} is not the folder of a sweep with tracker=wandb that has ended") from error
    own_group = str(own).removeprefix("sweep-").rpartition("-")[0]
    return Group(config["entity"], config["project"], config["group"] or own_group)


def write_report(source: str, *, api: Any = None) -> str:
    """Write a report of a sweep's online runs: step time over budget, curves beside predictions, the table. Return its
    address.

    Needs an account, wandb-workspaces, and a network. Raises ValueError, also with what W&B says if it refuses.
    """
    import wandb

    try:
        api = api or _api()
        found = group_of(source, api=api)
        entity = found.entity or api.default_entity
        where = f"{entity}/{found.project}"
        if not len(api.runs(where, filters={"group": found.group})):
            send = "wandb sync FOLDER/*/wandb/offline-run-*"
            raise ValueError(f"{where} has no runs of {found.group}; offline runs are sent by {send}")
        return _report(entity, found.project, found.group)
    except wandb.Error as error:
        raise ValueError(f"W&B: {error}") from error


def _api() -> Any:
    import wandb

    return wandb.Api()


def _report(entity: str, project: str, group: str) -> str:
    import wandb_workspaces.reports.v2 as reports

    def runs(kind: str) -> Any:
        return reports.Runset(
            entity=entity, project=project, name=kind, filters=f"Group == '{group}' and JobType == '{kind}'"
        )

    def lines(title: str, name: str) -> Any:
        return reports.LinePlot(title=title, x=_STEP, y=[f"train/{name}", f"predicted/{name}"])

    step_s = reports.SummaryMetric("step_s/median")
    panels: list[Any] = [
        reports.ScatterPlot(title="step time over budget", x=reports.Config("start.budget_bytes"), y=step_s),
        reports.ScatterPlot(title="step time over predicted", x=reports.Config("start.predicted.step_s"), y=step_s),
        reports.ScatterPlot(title="overlap over share of the schedule", x=reports.Config("job.schedule_share"),
                            y=reports.SummaryMetric("overlap_ratio")),
        lines("step time", "step_s"), lines("exposed communication", "exposed_s"),
        lines("overlap ratio", "overlap_ratio"),
    ]  # fmt: skip
    blocks: list[Any] = [
        reports.PanelGrid(runsets=[runs("train")], panels=panels),
        reports.PanelGrid(runsets=[runs("sweep")], panels=[reports.WeavePanelSummaryTable(table_name="runs")]),
    ]
    made = reports.Report(entity=entity, project=project, title=group, blocks=blocks)
    made.save()
    return str(made.url)
