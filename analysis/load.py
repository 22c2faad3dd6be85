"""Read the folders of runs and sweeps into dataframes.

A run's folder has the file of :mod:`analysis.events`, a sweep's one such folder per job, at any depth. A run that was
killed leaves what it had: reading never needs the summary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.events import METRICS, Event, last_attempt, read_events
from mdcs.plan.cost import TIMES
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.profile.link import Kind
from mdcs.telemetry.timeline import Timeline

KINDS = tuple(kind.value for kind in Kind)
RATES = ("throughput_samples_s", "throughput_tokens_s", "mfu")
"""Samples and tokens per second of all ranks, and the share of the devices' peak rate that the model's FLOPs are."""
PREDICTED = (*TIMES, "extra_communication_s", "peak_bytes")

PROVENANCE = ("time", "commit", "command", "host", "torch")
"""Where a run's figures come from: seconds since 1970, and words."""
COLUMNS: tuple[str, ...] = (
    *("name", "model", "parameters", "strategy", "scheduler", "budget_bytes", "schedule_share", "floor_bytes"),
    *("cross_iteration", "world", "emulated", "emulated_ranks", "shaped_gbit", "link_gbit", "congestion_control"),
    *("status", "reason", "steps"),
    *("step_s", "step_s_p10", "step_s_p90", *TIMES[1:], "extra_communication_s", "loss", *RATES, "processor_s"),
    "peak_bytes",
    *(f"predicted_{name}" for name in PREDICTED),
    *(f"predicted_memory_{category}" for category in CATEGORIES),
    *(f"measured_memory_{category}" for category in CATEGORIES),
    *("bytes_total", *(f"bytes_{kind}" for kind in KINDS)),
    *("messages_total", *(f"messages_{kind}" for kind in KINDS)),
    *("plan_hash", "execution_hash", "folder", "engine", "fits", *PROVENANCE),
)
WORKLOAD = ("model", "world", "emulated", "emulated_ranks", "shaped_gbit")
"""Columns of what must be equal for step times to be comparable."""
_TEXT = (
    *("name", "model", "strategy", "scheduler", "congestion_control", "status", "reason", "plan_hash"),
    *("execution_hash", "folder", "engine", *PROVENANCE[1:]),
)
_FLAGS = ("cross_iteration", "emulated", "emulated_ranks", "fits")


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it: what its job and start events say (`start`), its steps, a row each, in order, and
    its `summary` and `failure`, empty where there is none.
    """

    folder: Path
    start: Mapping[str, Any]
    steps: pd.DataFrame
    summary: Mapping[str, Any]
    failure: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ok, failed, infeasible (no plan keeps the budget), or incomplete (still running, or killed)."""
        if self.failure:
            return str(self.failure.get("status", "failed"))
        return str(self.summary.get("status", "ok")) if self.summary else "incomplete"

    @property
    def reason(self) -> str:
        """Why there is no summary, or why the predictions of a run that is ok are not to be believed; else empty."""
        if self.failure:
            where = [f"{key} {self.failure[key]}" for key in ("rank", "step") if self.failure.get(key) is not None]
            reason = str(self.failure.get("reason") or "no reason given")
            return f"{reason} ({', '.join(where)})" if where and where[0] not in reason else reason
        if self.summary:
            return str(self.summary.get("doubt") or "")
        return f"stopped after {len(self.steps)} steps without a summary"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run, by the full keys of its config: numbers, flags and words, null and lists in words."""
        told = (self.start.get("settings") or {}).items()
        return {key: of if isinstance(of, (bool, int, float, str)) else json.dumps(of) for key, of in told}

    @property
    def measured_steps(self) -> pd.DataFrame:
        """The steps after the warm-up; all steps if there are no others."""
        measured = self.steps[~self.steps["warmup"].astype(bool)] if "warmup" in self.steps else ()
        return measured if len(measured) else self.steps

    @property
    def recomputed(self) -> frozenset[str]:
        """Units whose activations the plan recomputes in backward."""
        return frozenset(self.start.get("recomputed") or ())

    def timeline(self) -> Timeline | None:
        """The measured period, None if none was recorded."""
        return self._timeline("timeline.json")

    def predicted_timeline(self) -> Timeline | None:
        """The simulated period, None if none was written."""
        return self._timeline("predicted_timeline.json")

    def _timeline(self, name: str) -> Timeline | None:
        path = self.folder / name
        try:
            return Timeline.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def row(self) -> dict[str, Any]:
        """Return this run as a row with `COLUMNS` and its settings; what is not known is None."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | dict(self.settings)
        row |= {key: self.start[key] for key in COLUMNS if key in self.start}
        row |= {"name": row["name"] or self.folder.name, "status": self.status, "reason": self.reason}
        row |= {"folder": str(self.folder), "steps": len(self.steps)}
        predicted, memory = self.start.get("predicted") or {}, self.summary.get("memory") or {}
        row |= {f"predicted_{key}": predicted.get(key) for key in PREDICTED}
        for source, sizes in (("predicted", predicted.get("memory")), *memory.items()):
            row |= {f"{source}_memory_{category}": (sizes or {}).get(category) for category in CATEGORIES if sizes}
        return row | self._measured()

    def _measured(self) -> dict[str, Any]:
        """Medians over the measured steps; from the summary what it knows of all ranks, or better."""
        steps, summary = self.measured_steps, self.summary
        numbers = steps.reindex(columns=[*TIMES, *RATES, "processor_s", "peak_bytes"]).astype(float)
        values: dict[str, Any] = numbers.median().to_dict() | {"peak_bytes": numbers["peak_bytes"].max()}
        values |= {"step_s_p10": numbers["step_s"].quantile(0.1), "step_s_p90": numbers["step_s"].quantile(0.9)}
        if "loss" in self.steps and len(self.steps):
            values["loss"] = self.steps["loss"].iloc[-1]
        told = {"peak_bytes": ((summary.get("memory") or {}).get("measured") or {}).get("total"), **summary}
        said = ("extra_communication_s", "loss", *RATES, "peak_bytes", "fits")
        values |= {key: told[key] for key in said if told.get(key) is not None}
        for key in ("bytes", "messages"):
            by_kind = summary.get(key) or (steps[key].iloc[-1] if key in steps and len(steps) else None)
            if isinstance(by_kind, Mapping):
                values |= {f"{key}_{kind}": by_kind.get(kind, 0) for kind in KINDS}
                values[f"{key}_total"] = sum(by_kind.values())
        return {key: value for key, value in values.items() if pd.notna(value)}


def load_run(folder: str | Path) -> Run:
    """Read one run: the last attempt, where several jobs ran in the folder, with the steps that it has gone on from.
    Those are warm-up: another attempt has made them, perhaps on another node.

    Raises FileNotFoundError if the folder has no metrics.jsonl, ValueError naming the line if that is corrupt.
    """
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run: it has no {METRICS}")
    events = read_events(path)
    attempt = last_attempt(events)
    by_event: dict[str, list[Event]] = {}
    for event in attempt:
        by_event.setdefault(event["event"], []).append(event)
    before = events[: len(events) - len(attempt)]
    told = {Path(event["folder"]).parent for event in before if event["event"] == "checkpoint"}
    # a killed run may not have told of its last one; a folder may be moved
    own = told | {folder.resolve() / "checkpoints"}
    done = max((e["step"] for e in by_event.get("resumed", []) if Path(e["folder"]).parent in own), default=0)
    steps = (event for event in before if event["event"] == "step" and event["step"] <= done)
    former = {event["step"]: event | {"warmup": True} for event in steps}
    last = {name: found[-1] for name, found in by_event.items()}
    return Run(
        folder=folder,
        start=last.get("job", {}) | last.get("start", {}),
        steps=pd.DataFrame([*(former[step] for step in sorted(former)), *by_event.get("step", [])]),
        summary=last.get("summary", {}),
        failure=last.get("failure", {}),
    )


def load_runs(folder: str | Path) -> list[Run]:
    """Read all runs at or below `folder`, in natural order (job 2 before job 10). A run whose metrics cannot be read is
    one that failed, for that reason.

    Raises FileNotFoundError if the folder does not exist, ValueError if there is no run in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    folders, found = (path.parent for path in folder.rglob(METRICS) if path.is_file()), []
    for path in sorted(folders, key=lambda of: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(of))]):
        try:
            found.append(load_run(path))
        except ValueError as error:
            found.append(Run(path, {}, pd.DataFrame(), {}, {"reason": str(error)}))
    if not found:
        raise ValueError(f"{folder} has no runs: no folder at or below it has a {METRICS}")
    return found


def table_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A dataframe of rows with `COLUMNS`, numbers as numbers, and a column for each setting that was swept."""
    frame = pd.DataFrame(rows)
    frame = frame.reindex(columns=[*COLUMNS, *(key for key in frame if "." in key and _is_swept(frame, key))])
    numbers = [column for column in COLUMNS if column not in (*_TEXT, *_FLAGS)]
    frame[numbers] = frame[numbers].apply(pd.to_numeric)
    return frame


_CHOSEN = {"model": "model", "strategy": "strategy", "scheduler": "scheduler", "engine": "engine", "data": "data.name",
           "optimizer": "optimizer.name"}  # fmt: skip
"""Keys that name the option of a group; the group's settings are compared among runs that have the same one."""


def _is_swept(frame: pd.DataFrame, key: str) -> bool:
    """Return whether runs of one workload, which chose the same option of the setting's group, differ in a setting."""
    chosen = _CHOSEN.get(key.partition(".")[0], key)
    by = [frame[each].map(str) for each in (*WORKLOAD, *({chosen} - {key})) if each in frame]
    return bool(frame[key].dropna().map(repr).groupby(by).nunique().gt(1).any())
