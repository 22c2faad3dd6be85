"""Content of a run's events (`analysis.events`). The parent process writes `job`, before the events of the ranks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import mdcs
from analysis.events import SCHEMA
from experiments.config.checks import as_mapping
from experiments.config.schema import Config
from experiments.config.targets import TARGET
from experiments.job.profiles import budget_bytes
from launch import network
from mdcs import cli
from mdcs.plan.cost import TIMES
from mdcs.planner.recompute import in_words
from mdcs.profile.link import Kind
from mdcs.profile.schema import is_far_off

if TYPE_CHECKING:  # these modules import torch: a program that only plans need not wait for it
    from experiments.engines.base import Engine, Record
    from experiments.job.workload import Throughput, Workload
    from mdcs.profiler.stages import Trial


def job_event(config: Config, began: float | None = None) -> dict[str, Any]:
    """The event of a job before a process starts. For a peer, `strategy` is the peer's name, and `scheduler` is "own".
    began: unix time from which the seconds to the first step count; None: now."""
    plans, cluster, now = config.engine.plans, config.cluster, time.time()
    return {
        "event": "job", "schema": SCHEMA, "time": now, "began": began or now, "name": config.run.name,
        "sweep": config.run.sweep, "model": config.model.label, "engine": config.engine.name,
        "strategy": config.strategy.name if plans else config.engine.label,
        "scheduler": (config.scheduler or config.strategy).name if plans else "own",
        "cross_iteration": config.run.cross_iteration if plans else None,
        "world": cluster.ranks, "emulated": config.link.name == "emulated", "emulated_ranks": cluster.emulated,
        "shaped_gbit": cluster.rate_gbit, "budget_bytes": budget_bytes(config, None, None),
        "schedule_share": config.budget.schedule_share, "settings": settings(config), **provenance(),
    }  # fmt: skip


def failure_event(
    reason: str, rank: int | None = None, step: int | None = None, *, status: str = "failed"
) -> dict[str, Any]:
    """The last event of a job that did not end well. status: failed, or infeasible."""
    return {"event": "failure", "status": status, "reason": reason, "rank": rank, "step": step, "time": time.time()}


@cache
def command_began() -> float:
    """Unix time at which this process started; off Linux, now."""
    now = time.time()
    if sys.platform != "linux":
        return now
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return now - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


@cache
def provenance() -> dict[str, str | None]:
    """Return the origin of a job's figures. commit: with a "+" if files differ from it; None without git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=10", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        commit = None
    program = next((f"mdcs {name}" for name, path in cli.PROGRAMS.items() if sys.argv[0].endswith(path)), sys.argv[0])
    command = f"{program} {shlex.join(sys.argv[1:])}".strip()
    version = importlib.metadata.version("torch")
    return {"commit": commit, "command": command, "host": socket.gethostname(), "torch": version}


_NOT_SETTINGS = (
    "model.name", "strategy.name", "scheduler.name", "engine.name", "tracker.", "sweep.", "paths.", "run.name",
    "run.sweep", "run.varied", "run.resume", "run.save_every", "run.keep", "run.save_beside", "profile.path",
    "profile.cache", "profile.refresh", "budget.limit", "budget.schedule_share", "cluster.name", "cluster.ranks",
    "cluster.rank", "cluster.rate_gbit", "cluster.timeout_s", "cluster.peak_tflops", "link.name",
    "run.cross_iteration", "recompute.each", "batch.", "data.workers",
)  # fmt: skip
"""Keys or groups that have their own column in tables, or on which no measurement depends."""


def settings(config: Config) -> dict[str, Any]:
    """All other settings of a job, by full key, with the names of the data set and the optimizer. Settings of strategy,
    scheduler and recomputation are left out for a peer."""
    told: dict[str, Any] = {}
    for group, values in as_mapping(config).items():
        if isinstance(values, Mapping) and (config.engine.plans or group not in ("strategy", "scheduler", "recompute")):
            made = getattr(config, group)
            named = {"name": getattr(made, "name", type(made).__name__.lower())} if TARGET in values else {}
            told |= {f"{group}.{key}": value for key, value in {**named, **values}.items() if key != TARGET}
    return {key: value for key, value in told.items() if not key.startswith(_NOT_SETTINGS)}


def start_event(
    config: Config, plan: mdcs.Plan | None, floor: int | None, trials: Sequence[Trial] = (),
    throughput: Throughput | None = None, parameters: int | None = None,
) -> dict[str, Any]:
    """The event at the beginning of training, and again once a plan is chosen: its prediction, and the plans tried. A
    peer has no plan. parameters: of the model; None: those of the plan's units."""
    begins = {
        "event": "start", "time": time.time(), "congestion_control": network.congestion_control(),
        "parameters": parameters, **({"flops": throughput.flops} if throughput and throughput.flops else {}),
    }  # fmt: skip
    if plan is None:
        return begins
    assert plan.prediction is not None
    # The rate of a rank's link as it was set, or else as the profile measured it.
    set_rate, beta = config.cluster.rate_gbit or config.link.rate_gbit, plan.profile.link.beta_of(Kind.AG_F)
    predicted = dataclasses.asdict(plan.prediction)
    predicted["extra_communication_s"] = plan.job.cost.extra_communication_s(plan.sent_bytes())
    return begins | {
        "parameters": parameters or sum(unit.numel for unit in plan.profile.units),
        "link_gbit": set_rate or (8e-9 / beta if beta else None),
        "recomputed": [u.name for u, again in zip(plan.profile.units, plan.recompute, strict=False) if again != "none"],
        "recomputation": in_words(plan), "plan_hash": plan.hash, "execution_hash": plan.execution_hash,
        "world": plan.world, "emulated": plan.profile.link.emulated,
        "collectives": str(plan.profile.collectives), "cross_iteration": plan.cross_iteration,
        "budget_bytes": plan.budget, "floor_bytes": floor,
        "outcome": plan.outcome, "bound_s": plan.bound_s, "predicted": predicted,
        "tried": [trial.row() for trial in trials],
    }  # fmt: skip


def step_event(
    workload: Workload, engine: Engine, record: Record, loss: float, warmup: bool, throughput: Throughput,
) -> dict[str, Any]:
    """The event of a step that has ended, to which the training loop adds two values.

    - learning_rate: of the optimizer's first parameter group, with which the step updated.
    - processor_s (s): processor time of all threads of this process, until the training thread has ended the step.
    - warmup: whether the summary leaves the step out.
    - plan, handover_s (s): of the record; left out of steps that did not choose a plan, and without a change.
    - loss: of this rank; the mean over ranks would need a message. Loss and grad_norm are null on emulated ranks, where
      they have no meaning.
    - departures, departed_s: of the record; left out of steps that were as planned.
    """
    retries = engine.allocator_retries()
    return {
        "event": "step", "step": record.step, "warmup": warmup, "loss": workload.shown(loss),
        **dataclasses.asdict(record.times), "bytes": record.bytes, "messages": record.messages,
        **throughput.in_step(record.times.step_s), "peak_bytes": engine.peak_bytes(),
        **({} if retries is None else {"allocator_retries": retries}),
        **({"plan": record.plan} if record.plan else {}),
        **({"handover_s": record.handover_s} if record.handover_s else {}),
        **({"departures": record.departures, "departed_s": record.departed_s} if record.departures else {}),
        **({} if record.grad_norm is None else {"grad_norm": workload.shown(record.grad_norm)}),
    }  # fmt: skip


def whole_step(records: Sequence[Record]) -> Record:
    """A record of a step with all its messages. The last step's messages are cut short by drain()."""
    return records[-2:][0]


def summary_event(
    workload: Workload, records: Sequence[Record], loss: float, peak: int | None,
    processor: Mapping[int, float], throughput: Throughput,
) -> dict[str, Any]:  # fmt: skip
    """The summary: medians over `records`, the steps after warm-up.

    - loss: mean over ranks in the last step.
    - bytes, messages: of a whole period; all periods are equal.
    - peak_bytes (bytes): of the rank with the highest peak.
    - processor_s (s): median of this rank's `processor`, which has seconds by step.
    - doubt: reason why predictions are not reliable; empty if there is none.
    """
    config, times = workload.config, [record.times for record in records]

    def median(name: str) -> float | None:
        known = [value for each in times if (value := getattr(each, name)) is not None]
        return float(np.median(known)) if known else None

    p10, middle, p90 = (float(q) for q in np.quantile([each.step_s for each in times], (0.1, 0.5, 0.9)))
    whole = whole_step(records)
    budget = budget_bytes(config, workload.floor, workload.plan.job if workload.plan else None)
    return {
        "event": "summary", "status": "ok", "steps": config.run.steps, "emulated_ranks": config.cluster.emulated,
        "step_s": {"median": middle, "p10": p10, "p90": p90},
        **{name: median(name) for name in TIMES if name != "step_s"},
        "loss": workload.shown(loss), **throughput.in_step(middle),
        "processor_s": float(np.median([processor[record.step] for record in records])),
        "bytes": whole.bytes, "messages": whole.messages, "peak_bytes": peak,
        "fits": None if peak is None or budget is None else peak <= budget,
        "doubt": "" if workload.plan is None else doubt(workload.plan, middle),
    }  # fmt: skip


def departures(records: Sequence[Record]) -> dict[str, Any]:
    """The departures of these steps from their plan, for the summary; empty if there is none.

    - departures: in words, the most frequent first: "2 of 100 steps left out layers.3".
    - departures_cost_s (s): what departing steps took beyond the median of the others; None if all departed.
    """
    counts = Counter(what for record in records for what in record.departures)
    if not counts:
        return {}
    departing, others = ([r.times.step_s for r in records if bool(r.departures) is is_so] for is_so in (True, False))
    cost_s = sum(departing) - len(departing) * statistics.median(others) if others else None
    words = [f"{count} of {len(records)} steps {what}" for what, count in counts.most_common()]
    return {"departures": words, "departures_cost_s": cost_s}


def doubt(plan: mdcs.Plan, measured_s: float) -> str:
    """Reason why predictions of a run with this measured step (s) are not reliable; empty if there is none."""
    assert plan.prediction is not None
    predicted_s, warning = plan.prediction.step_s, plan.profile.reliability_warning
    if not is_far_off(predicted_s, measured_s):
        return ""
    said = f"a step was predicted to take {predicted_s * 1e3:.1f} ms, and took {measured_s * 1e3:.1f}"
    said += "; profile.refresh=true measures anew"
    return f"{said}; {warning}" if warning else said
