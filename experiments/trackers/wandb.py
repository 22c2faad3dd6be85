"""Weights & Biases: a run per job, and a run per sweep with the sweep's table."""

from __future__ import annotations

import netrc
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.trackers.tracker import Event, Mirror, Shown, Tracker, flat, train_values
from mdcs.options import option

STEP = "train/step"
SCATTER = ("budget_gib", "step_s")
"""Columns of a sweep's table for a scatter plot: x, y."""


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases."""

    name = "wandb"
    title = "W&B"

    project: str = option("mdcs", "W&B project")
    entity: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group; null: the sweep")
    id: str | None = option(None, "W&B run id; null: a new one for each run, which begins alike for equal jobs")
    mode: str | None = option(
        None, "null: online with a W&B account on this machine, else offline", choices=("offline", "online", "disabled")
    )

    timeout_s: float = option(30.0, "an answer that takes longer, uploads included, is not waited for", above=0)

    @property
    def patience_s(self) -> float:
        """The option `timeout_s`."""
        return self.timeout_s

    def mirror(self, run: Shown) -> Mirror:
        """A run of W&B with its files in the run's folder."""
        return WandbMirror(self, run)


class WandbMirror(Mirror):
    """One run of W&B."""

    def __init__(self, tracker: Wandb, run: Shown) -> None:
        import wandb

        self._wandb: Any = wandb
        resumes = bool(run.config.get("run", {}).get("resume"))
        mode = tracker.mode or default_mode(os.environ)
        self._kept = resumes and mode == "online"
        own = run.id if tracker.id is None or run.kind == "sweep" else tracker.id
        if not self._kept:  # the run is written anew: remove its offline files, so that they are not sent twice
            for former in run.folder.glob(f"wandb/offline-run-*-{own}"):
                shutil.rmtree(former)
        self._run = self._wandb.init(
            project=tracker.project, entity=tracker.entity, group=tracker.group or run.group, job_type=run.kind, id=own,
            name=run.name, dir=str(run.folder), mode=mode, config=dict(run.config),
            resume="allow" if self._kept else None, reinit="create_new", save_code=False,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=tracker.timeout_s, finish_timeout=tracker.timeout_s,
                # W&B would collect more than the config by itself: arguments, git remotes, the host.
                disable_git=True, x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True,
                x_save_requirements=False, host="not told",
            ),
        )  # fmt: skip
        self._run.define_metric(STEP)
        for names in ("train/*", "eval/*"):
            self._run.define_metric(names, step_metric=STEP)

    def past(self, steps: Sequence[Event]) -> None:
        """Show earlier steps again, unless the run is online: W&B then continues the run and has them."""
        if not self._kept:
            super().past(steps)

    def event(self, event: Event) -> None:
        """Show steps and evaluations over train/step, job and start in the config, and other events in the summary."""
        values = {key: value for key, value in event.items() if key != "event"}
        match event["event"]:
            case "step":
                self._run.log(train_values(event))
            case "eval":
                self._run.log({STEP: values.pop("step"), **flat(values, "eval/")})
            case "job" | "start" as name:
                self._run.config.update({name: values}, allow_val_change=True)
            case _:
                self._run.summary.update(flat(values))

    def pictures(self, files: Sequence[Path]) -> None:
        """Log the pictures under the names of their files."""
        if files:
            self._run.log({file.stem: self._wandb.Image(str(file)) for file in files})

    def document(self, kind: str, file: Path) -> None:
        """Log the file as an artifact, named by its kind and the run's id."""
        artifact = self._wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
        artifact.add_file(str(file))
        self._run.log_artifact(artifact)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log the table, and a plot of step time over budget for runs that have both."""
        made = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"runs": made})
        x, y = (columns.index(name) for name in SCATTER)
        points = [row for row in rows if row[x] is not None and row[y] is not None]
        if points:
            drawn = self._wandb.Table(columns=list(columns), data=[list(row) for row in points])
            self._run.log({"step time over budget": self._wandb.plot.scatter(drawn, *SCATTER, title="step time over budget")})

    def finish(self, ok: bool) -> None:
        """End the run, as failed or not."""
        self._run.finish(exit_code=0 if ok else 1)


def default_mode(env: Mapping[str, str]) -> str:
    """W&B's mode when the config has none: $WANDB_MODE, else online with an account, else offline.

    Without an account W&B would ask for one on the terminal, or fail where there is no terminal.
    """
    if mode := env.get("WANDB_MODE"):
        return mode
    if env.get("WANDB_API_KEY"):
        return "online"
    try:
        hosts = netrc.netrc(env.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return "online" if any("wandb" in host for host in hosts) else "offline"


def report(entity: str, project: str, group: str, title: str) -> str:
    """Write a report of a sweep's online runs: step time over budget, curves of steps, the table. Return its address.

    Needs an account, wandb-workspaces, and network: W&B keeps reports only on its server.
    """
    import wandb_workspaces.reports.v2 as reports

    step_s = reports.SummaryMetric("step_s/median")
    runs = reports.Runset(entity=entity, project=project, name=title, filters=f"Group == '{group}' and JobType == 'train'")
    panels: list[Any] = [
        reports.ScatterPlot(title="step time over budget", x=reports.Config("start.budget_bytes"), y=step_s),
        reports.ScatterPlot(title="overlap over share of the schedule", x=reports.Config("job.schedule_share"),
                            y=reports.SummaryMetric("overlap_ratio")),
        reports.LinePlot(title="step time", x=STEP, y=["train/step_s"]),
        reports.LinePlot(title="exposed communication", x=STEP, y=["train/exposed_s"]),
        reports.LinePlot(title="overlap ratio", x=STEP, y=["train/overlap_ratio"]),
    ]  # fmt: skip
    made = reports.Report(entity=entity, project=project, title=title, blocks=[reports.PanelGrid(runsets=[runs], panels=panels)])
    made.save()
    return str(made.url)
