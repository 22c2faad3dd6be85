"""Read the folders of runs and sweeps into dataframes.

A run's folder has `metrics.jsonl`: a start line, a line per step, and a summary or a failure. A sweep's folder has
one such folder per job, at any depth. A run that was killed leaves what it had: reading never needs the summary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mdcs.measure.timeline import Timeline
from mdcs.plan.ledger import CATEGORIES
from mdcs.profile.link import Kind

METRICS = "metrics.jsonl"
KINDS = tuple(kind.value for kind in Kind)
TIMES = ("step_s", "compute_s", "communication_s", "overlap_s", "exposed_s", "overlap_ratio")
PREDICTED = (*TIMES, "extra_communication_s", "peak_bytes")
GIB = 2**30

COLUMNS: tuple[str, ...] = (
    *(
        "name",
        "model",
        "strategy",
        "scheduler",
        "budget_gib",
        "budget_bytes",
        "schedule_share",
        "floor_bytes",
    ),
    *("cross_iteration", "world", "emulated", "emulated_ranks", "shaped_gbit", "congestion_control"),
    *("status", "reason", "steps"),
    *(
        "step_s",
        "step_s_p10",
        "step_s_p90",
        *TIMES[1:],
        "extra_communication_s",
        "loss",
        "throughput_samples_s",
    ),
    "peak_bytes",
    *(f"predicted_{name}" for name in PREDICTED),
    *(f"predicted_memory_{category}" for category in CATEGORIES),
    *(f"measured_memory_{category}" for category in CATEGORIES),
    *("bytes_total", *(f"bytes_{kind}" for kind in KINDS)),
    *("messages_total", *(f"messages_{kind}" for kind in KINDS)),
    *("plan_hash", "folder", "engine", "fits"),
)
_TEXT = (
    *("name", "model", "strategy", "scheduler", "congestion_control", "status", "reason", "plan_hash", "folder"),
    "engine",
)
_FLAGS = ("cross_iteration", "emulated", "emulated_ranks", "fits")


@dataclass(frozen=True)
class Run:
    """One run as its folder tells it.

    `start`, `summary` and `failure` are the lines of that name (empty where there is none), `steps` the step lines,
    one row each, in order.
    """

    folder: Path
    start: Mapping[str, Any]
    steps: pd.DataFrame
    summary: Mapping[str, Any]
    failure: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ok, failed, or incomplete (neither a summary nor a failure: still running, or killed)."""
        if self.failure:
            return "failed"
        return str(self.summary.get("status", "ok")) if self.summary else "incomplete"

    @property
    def reason(self) -> str:
        """Why there is no summary; empty for a run that is ok."""
        if self.failure:
            where = [
                f"{key} {self.failure[key]}" for key in ("rank", "step") if self.failure.get(key) is not None
            ]
            reason = str(self.failure.get("reason") or "no reason given")
            return f"{reason} ({', '.join(where)})" if where and where[0] not in reason else reason
        return "" if self.summary else f"stopped after {len(self.steps)} steps without a summary"

    @property
    def measured_steps(self) -> pd.DataFrame:
        """The steps after the warm-up; all steps if there are no others."""
        if "warmup" not in self.steps:
            return self.steps
        measured = self.steps[~self.steps["warmup"].astype(bool)]
        return measured if len(measured) else self.steps

    def timeline(self) -> Timeline | None:
        """The measured period, None if none was recorded."""
        return _read_timeline(self.folder / "timeline.json")

    def predicted_timeline(self) -> Timeline | None:
        """The simulated period, None if none was written."""
        return _read_timeline(self.folder / "predicted_timeline.json")

    def row(self) -> dict[str, Any]:
        """This run as a row with `COLUMNS`; what is not known is None."""
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        start = {**_facts_without_start(self.folder), **self.start}
        row |= {key: start[key] for key in COLUMNS if key in start}
        row |= {"name": row["name"] or self.folder.name, "status": self.status, "reason": self.reason}
        row |= {"folder": str(self.folder), "steps": len(self.steps)}
        if row["budget_bytes"] is not None:
            row["budget_gib"] = row["budget_bytes"] / GIB

        predicted = start.get("predicted") or {}
        row |= {f"predicted_{key}": predicted.get(key) for key in PREDICTED}
        row |= self._measured()
        memory = self.summary.get("memory") or {}
        for source in ("predicted", "measured"):
            by_category = (
                memory.get(source) or (predicted.get("memory") if source == "predicted" else None) or {}
            )
            row |= {f"{source}_memory_{category}": by_category.get(category) for category in CATEGORIES}
        return row

    def _measured(self) -> dict[str, Any]:
        """Medians over the measured steps, replaced by the summary's values where it has them."""
        steps, summary = self.measured_steps, self.summary
        values: dict[str, Any] = {}
        for key in (*TIMES, "throughput_samples_s"):
            if key in steps and steps[key].notna().any():
                values[key] = float(steps[key].median())
        if "step_s" in values:
            values["step_s_p10"], values["step_s_p90"] = (
                float(steps["step_s"].quantile(q)) for q in (0.1, 0.9)
            )
        if "loss" in self.steps and len(self.steps):
            values["loss"] = self.steps["loss"].iloc[-1]
        if "peak_bytes" in steps and steps["peak_bytes"].notna().any():
            values["peak_bytes"] = float(steps["peak_bytes"].max())
        counts = {
            key: steps[key].iloc[-1] if key in steps and len(steps) else None for key in ("bytes", "messages")
        }

        known = {key: summary[key] for key in (*TIMES[1:], "extra_communication_s", "loss", "throughput_samples_s")
                 if summary.get(key) is not None}  # fmt: skip
        values |= known
        if summary.get("step_s"):
            spread = summary["step_s"]
            values |= {"step_s": spread["median"], "step_s_p10": spread["p10"], "step_s_p90": spread["p90"]}
        measured_memory = (summary.get("memory") or {}).get("measured") or {}
        if measured_memory.get("total") is not None:
            values["peak_bytes"] = measured_memory["total"]
        values |= {key: summary[key] for key in ("peak_bytes", "fits") if summary.get(key) is not None}
        for key in ("bytes", "messages"):
            by_kind = summary.get(key) or counts[key]
            if isinstance(by_kind, Mapping):
                values |= {f"{key}_{kind}": by_kind.get(kind, 0) for kind in KINDS}
                values[f"{key}_total"] = sum(by_kind.values())
        return values


def load_run(folder: str | Path) -> Run:
    """Read one run.

    Raises FileNotFoundError if the folder has no metrics.jsonl, ValueError naming the line if that is corrupt.
    """
    folder = Path(folder)
    path = folder / METRICS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a run: it has no {METRICS}")
    events = _read_events(path)
    # A run that was started again in the same folder appends: what counts is the last attempt.
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    events = events[starts[-1] :] if starts else events
    by_event: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        by_event.setdefault(event["event"], []).append(event)
    last: dict[str, dict[str, Any]] = {name: found[-1] for name, found in by_event.items()}
    return Run(
        folder=folder,
        start=last.get("start", {}),
        steps=pd.DataFrame(by_event.get("step", [])),
        summary=last.get("summary", {}),
        failure=last.get("failure", {}),
    )


def run_folders(folder: str | Path) -> list[Path]:
    """The folders of all runs at or below `folder`, in natural order (job 2 before job 10)."""
    found = (path.parent for path in Path(folder).rglob(METRICS) if path.is_file())
    return sorted(
        found, key=lambda path: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", str(path))]
    )


def load_sweep(folder: str | Path) -> pd.DataFrame:
    """Read all runs at or below `folder`: one row per run, with `COLUMNS`; times in seconds, sizes in bytes.

    `status` is ok, failed or incomplete, `reason` says why. A run whose metrics cannot be read is a failed row.
    Raises FileNotFoundError if the folder does not exist, ValueError if there is no run in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    folders = run_folders(folder)
    if not folders:
        raise ValueError(f"{folder} has no runs: no folder at or below it has a {METRICS}")
    rows = []
    for path in folders:
        try:
            rows.append(load_run(path).row())
        except ValueError as error:
            unreadable = Run(path, {}, pd.DataFrame(), {}, {"reason": str(error)})
            rows.append(unreadable.row())
    return table_of(rows)


def table_of(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A dataframe of rows with `COLUMNS`, all but text and flags as numbers."""
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    for column in COLUMNS:
        if column not in _TEXT and column not in _FLAGS:
            frame[column] = pd.to_numeric(frame[column])
    return frame


def _read_events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        event = _event(line)
        if event is None and (cut := _FAILURE.search(line)):
            # A killed writer leaves half a line, and the parent appends the failure right behind it.
            event = _event(line[cut.start() :])
        if event is not None:
            events.append(event)
        elif any(rest.strip() for rest in lines[number:]):
            raise ValueError(f"{path.name}, line {number}: not a JSON object with an event")
    return events


_FAILURE = re.compile(r'\{"event": ?"failure"')


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _read_timeline(path: Path) -> Timeline | None:
    if not path.is_file():
        return None
    try:
        return Timeline.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _facts_without_start(folder: Path) -> dict[str, Any]:
    """What plan.json and config.yaml say of a run, for one that failed before its first line."""
    facts: dict[str, Any] = {}
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        for key, paths in _CONFIG_PATHS.items():
            found = (_at(config, path) for path in paths)
            if (value := next((v for v in found if v is not None), None)) is not None:
                facts[key] = value
        if isinstance(gib := _at(config, "budget.gib"), int | float):
            facts["budget_bytes"] = int(gib * GIB)
        if (link := _at(config, "link.name")) is not None:
            facts["emulated"] = link == "emulated"
        if (cluster := _at(config, "cluster.name")) is not None:
            facts["emulated_ranks"] = cluster == "emulated"
    except (OSError, yaml.YAMLError):
        pass
    try:
        plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        facts |= {
            key: plan[key] for key in ("strategy", "scheduler", "world", "cross_iteration") if key in plan
        }
        if plan.get("budget") is not None:
            facts["budget_bytes"] = plan["budget"]
    except (OSError, ValueError, TypeError, AttributeError):
        pass
    return facts


_CONFIG_PATHS: dict[str, tuple[str, ...]] = {
    "name": ("run.name",),
    "model": ("model.name",),
    "strategy": ("strategy.kind", "strategy.name"),
    "scheduler": ("scheduler.name",),
    "schedule_share": ("budget.schedule_share",),
    "cross_iteration": ("scheduler.cross_iteration",),
    "world": ("cluster.ranks",),
    "shaped_gbit": ("cluster.rate_gbit",),
}


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None
    return config
