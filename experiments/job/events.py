"""The events of a run, as rank 0 writes them to metrics.jsonl: its start, its steps and its summary."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import mdcs
from experiments.config.schema import Config
from experiments.job.planning import budget_bytes
from launch import network

if TYPE_CHECKING:  # which import torch: a program that only plans need not wait for it
    from experiments.engines.base import Engine, Record
    from experiments.job.workload import Workload


def start_event(config: Config, plan: mdcs.Plan, floor: int | None) -> dict[str, Any]:
    assert plan.prediction is not None
    predicted = dataclasses.asdict(plan.prediction)
    predicted["extra_communication_s"] = plan.job.cost.extra_communication_s(plan.sent_bytes())
    return {
        "event": "start", "time": time.time(), "emulated": plan.profile.link.emulated,
        "emulated_ranks": config.cluster.emulated, "plan_hash": plan.hash,
        "sweep": config.run.sweep, "name": config.run.name, "world": plan.world, "strategy": plan.strategy,
        "scheduler": plan.scheduler, "collectives": str(plan.profile.collectives), "model": config.model.name,
        "budget_bytes": budget_bytes(config, floor), "admission_bytes": plan.budget,
        "schedule_share": config.budget.schedule_share, "floor_bytes": floor,
        "shaped_gbit": config.cluster.rate_gbit, "congestion_control": network.congestion_control(),
        "cross_iteration": plan.cross_iteration, "outcome": plan.outcome, "bound_s": plan.bound_s,
        "predicted": predicted, "engine": config.engine.name,
    }  # fmt: skip


def start_of_peer(config: Config, world: int) -> dict[str, Any]:
    """A peer has no plan: its name stands for the strategy, and the schedule is its own."""
    return {
        "event": "start", "time": time.time(), "emulated": False, "sweep": config.run.sweep, "name": config.run.name,
        "world": world, "strategy": config.engine.label, "scheduler": "own", "model": config.model.name,
        "budget_bytes": budget_bytes(config, None), "engine": config.engine.name,
    }  # fmt: skip


def step_event(workload: Workload, engine: Engine, record: Record, loss: float) -> dict[str, Any]:
    """A step that has ended; loss and norm are null where ranks are emulated: they mean nothing there."""
    retries = engine.allocator_retries()
    return {
        "event": "step", "step": record.step, "warmup": record.step <= workload.config.run.warmup_steps,
        "loss": workload.shown(loss), **dataclasses.asdict(record.times), "bytes": record.bytes, "messages": record.messages,
        "throughput_samples_s": workload.samples_per_step / record.times.step_s,
        "peak_bytes": engine.peak_bytes(),
        **({} if retries is None else {"allocator_retries": retries}),
        **({} if engine.grad_norm is None else {"grad_norm": workload.shown(engine.grad_norm)}),
    }  # fmt: skip


def whole_step(records: Sequence[Record]) -> Record:
    """One that has sent all that a step sends: the last is cut short by drain()."""
    return records[-2:][0]


def summary_event(
    workload: Workload, records: Sequence[Record], loss: float, peak: int | None, floor: int | None
) -> dict[str, Any]:
    """Medians over `records`, the steps after warm-up; bytes and messages of a whole period, as every one sends the same;
    `loss` is the last step's, `peak` that of the rank that held most.
    """
    config, times = workload.config, [record.times for record in records]

    def median(name: str) -> float | None:
        known = [value for each in times if (value := getattr(each, name)) is not None]
        return float(np.median(known)) if known else None

    p10, middle, p90 = (float(q) for q in np.quantile([each.step_s for each in times], (0.1, 0.5, 0.9)))
    whole, budget = whole_step(records), budget_bytes(config, floor)
    return {
        "event": "summary", "status": "ok", "steps": config.run.steps, "emulated_ranks": config.cluster.emulated,
        "step_s": {"median": middle, "p10": p10, "p90": p90},
        **{n: median(n) for n in ("compute_s", "communication_s", "overlap_s", "exposed_s", "overlap_ratio")},
        "loss": workload.shown(loss), "throughput_samples_s": workload.samples_per_step / middle,
        "bytes": whole.bytes, "messages": whole.messages, "peak_bytes": peak,
        "fits": None if peak is None or budget is None else peak <= budget,
    }  # fmt: skip
