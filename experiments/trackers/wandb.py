"""Weights & Biases: a run per job, and a run per sweep with the sweep's table."""

from __future__ import annotations

import configparser
import hashlib
import netrc
import os
import shutil
import urllib.parse
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.trackers.tracker import Event, Mirror, Shown, Tracker, flat, one_line, predicted_values, train_values
from mdcs.options import option

STEP = "train/step"
SCATTER = ("budget_bytes", "step_s")  # columns of a sweep's table for a scatter plot: x, y


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases."""

    name = "wandb"
    title = "W&B"
    project: str = option("mdcs", "W&B project")
    entity: str | None = option(None, "W&B entity")
    group: str | None = option(None, "W&B group; null: the sweep")
    id: str | None = option(None, "W&B run id; null: a new one, whose beginning is the job's identity")
    mode: str | None = option(
        None, "null: online with a W&B account on this machine, else offline", choices=("offline", "online", "disabled")
    )
    private: bool = option(
        False, "true: send only the config and the run's events; no system metrics, commit, command line or host"
    )
    timeout_s: float = option(
        30.0, "seconds to wait for W&B, uploads included; without a connection after half of it the run is offline",
        above=0,
    )  # fmt: skip

    def mirror(self, run: Shown) -> Mirror:
        return WandbMirror(self, run)


_PRIVATE = ("commit", "command", "host")  # keys of a job event that W&B does not get with `private`
_UNREACHED: list[str] = []  # Why W&B was not reached. Later runs of this process are then offline at once.


class WandbMirror(Mirror):
    """One run of W&B. A run that cannot be online is offline, with a warning that says how to send it."""

    def __init__(self, tracker: Wandb, run: Shown) -> None:
        own = run.id if tracker.id is None or run.kind == "sweep" else tracker.id
        mode = tracker.mode or ("offline" if _UNREACHED else default_mode(os.environ))
        try:
            self._begin(tracker, run, own, mode)
        except Exception as error:  # no network, a wrong key, no such entity: W&B raises several types
            if mode != "online":
                raise
            _UNREACHED.append(one_line(error))
            # W&B still holds the id. The offline copy is whole, so it must not be sent into a run that has been online.
            self._begin(tracker, run, f"{own}-offline", "offline")
            send = f"wandb sync {run.folder}/wandb/offline-run-*"
            warnings.warn(
                f"W&B cannot be reached, runs are kept offline ({send} sends this one): {_UNREACHED[0]}", stacklevel=2
            )

    def _begin(self, tracker: Wandb, run: Shown, own: str, mode: str) -> None:
        import wandb
        self._wandb: Any = wandb
        self._predicted: dict[str, Any] = {}
        self._offline = mode == "offline"
        self._kept = mode == "online" and bool(run.config.get("run", {}).get("resume"))
        if not self._kept:  # the run is written anew: remove its offline files, so that they are not sent twice
            for former in run.folder.glob(f"wandb/offline-run-*-{own}"):
                shutil.rmtree(former)
        private = self._private = tracker.private
        root = str(Path(__file__).resolve().parents[2])
        place: dict[str, Any] = {"host": "private"} if private else {"git_root": root}
        self._run = self._wandb.init(
            project=tracker.project, entity=tracker.entity, group=tracker.group or run.group, job_type=run.kind, id=own,
            name=run.name, dir=str(run.folder), mode=mode, config=dict(run.config),
            resume="allow" if self._kept else None, reinit="create_new", save_code=False,
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=tracker.timeout_s / 2, finish_timeout=tracker.timeout_s,
                disable_git=private, x_disable_meta=private, x_disable_stats=private, x_disable_machine_info=private,
                x_save_requirements=not private, **place,
            ),
        )  # fmt: skip
        self._run.define_metric(STEP)
        for names in ("train/*", "eval/*", "predicted/*"):
            self._run.define_metric(names, step_metric=STEP)

    def past(self, steps: Sequence[Event]) -> None:
        """Show earlier steps again, unless the run is online: W&B then continues the run and has them."""
        if not self._kept:
            super().past(steps)

    def event(self, event: Event) -> None:
        """Show steps and evaluations over train/step, job and start in the config, others in the summary."""
        hidden = ("event", *(_PRIVATE if self._private else ()))
        values = {key: value for key, value in event.items() if key not in hidden}
        match event["event"]:
            case "step":
                self._run.log(train_values(event) | self._predicted)
            case "eval":
                self._run.log({STEP: values.pop("step"), **flat(values, "eval/")})
            case "job" | "start" as name:
                self._predicted = predicted_values(event)
                if rows := values.pop("tried", None):
                    table = self._wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
                    self._run.log({"candidates": table})
                self._run.config.update({name: values}, allow_val_change=True)
            case _:
                self._run.summary.update(flat(values))

    def pictures(self, files: Sequence[Path]) -> None:
        if files:
            self._run.log({file.stem: self._wandb.Image(str(file)) for file in files})

    def document(self, kind: str, file: Path, used: bool) -> None:
        """Log the file as an artifact that the run made or used, named by its content: equal files are sent once."""
        artifact = self._wandb.Artifact(f"{kind}-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}", type=kind)
        artifact.add_file(str(file), name=f"{kind}.json")
        if not used:
            self._run.log_artifact(artifact)
        elif self._offline:  # use_artifact refuses, but records the same way
            self._run._log_artifact(artifact, is_user_created=True, use_after_commit=True)
        else:
            self._run.use_artifact(artifact)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log the table, and a plot of step time over budget for runs that have both."""
        made = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({"runs": made})
        x, y = (columns.index(name) for name in SCATTER)
        points = [row for row in rows if row[x] is not None and row[y] is not None]
        if points:
            title = "step time over budget"
            drawn = self._wandb.Table(columns=list(columns), data=[list(row) for row in points])
            self._run.log({title: self._wandb.plot.scatter(drawn, *SCATTER, title=title)})

    def finish(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


def default_mode(env: Mapping[str, str]) -> str:
    """W&B's mode when the config has none: $WANDB_MODE, else online with an account, else offline. Without an account
    W&B would ask for one on the terminal, or fail where there is no terminal."""
    if mode := env.get("WANDB_MODE"):
        return mode
    if env.get("WANDB_API_KEY"):
        return "online"
    try:
        hosts = netrc.netrc(env.get("NETRC") or os.path.expanduser("~/.netrc")).hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    settings = configparser.ConfigParser()  # in which `wandb login --host` has noted its server
    with suppress(configparser.Error, OSError):
        settings.read(Path(env.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb")) / "settings")
    noted = settings.get("default", "base_url", fallback="https://api.wandb.ai")
    server = urllib.parse.urlsplit(env.get("WANDB_BASE_URL") or noted).hostname
    return "online" if server in hosts else "offline"

