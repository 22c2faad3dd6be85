"""Synthetic runs and sweeps with the files of real ones, from a toy model of one link and one compute lane."""

import itertools
import json
import random
from pathlib import Path

import pytest

import analysis
from analysis.events import SCHEMA
from mdcs.telemetry.timeline import PREDICTED_RANK, Interval, RankTimeline, SlotMemory, Timeline

MIB = 2**20


def toy_period(rank=PREDICTED_RANK, layers=6, noise=0.0, seed=0, layer_mib=8.0, depth=2):
    """One period of a mixed plan: layer 1 dp, the middle zero2, the last fsdp; messages in order on one link."""
    rng = random.Random(f"{seed}{rank}")

    def slow(seconds):
        return seconds * (1 + abs(rng.gauss(0, noise)))

    intervals, clock, link_free = [], 0.0, [0.0] * depth

    def send(kind, layer, ready, mib):
        lane = min(range(depth), key=lambda i: link_free[i])
        start = max(ready, link_free[lane])
        link_free[lane] = start + slow(mib * 0.0032)
        name = f"{kind} {layer}"
        size = int(mib * MIB)
        intervals.append(Interval("message", name, kind, f"block.{layer}", start, link_free[lane], size))
        return link_free[lane]

    ready_forward = {}
    for layer in range(layers, 0, -1):
        start = clock
        clock += slow(0.042)
        intervals.append(Interval("compute", f"B{layer}", "B", f"block.{layer}", start, clock))
        if layer == 1:
            end = send("AR", layer, clock, 2 * layer_mib)
        else:
            end = send("RS", layer, clock, layer_mib)
        update_end = end + slow(0.006)
        intervals.append(Interval("update", f"update {layer}", "update", f"block.{layer}", end, update_end))
        ready_forward[layer] = update_end
    for layer in range(2, layers + 1):
        ready_forward[layer] = send("AG_F", layer, ready_forward[layer], layer_mib)
    for layer in range(1, layers + 1):
        start = max(clock, ready_forward[layer])
        clock = start + slow(0.021)
        intervals.append(Interval("compute", f"F{layer}", "F", f"block.{layer}", start, clock))
        if layer == layers - 1:
            send("AG_B", layer, clock, layer_mib)
    return RankTimeline(rank, tuple(intervals)), max(clock, max(i.end for i in intervals))


def toy_memory(layers=6, measured=True):
    slots = [f"B{n}" for n in range(layers, 0, -1)] + [f"F{n}" for n in range(1, layers + 1)]
    memory = []
    for index, slot in enumerate(slots):
        backward = index < layers
        done = index + 1 if backward else layers
        predicted = {
            "parameters": 52 * MIB,
            "full_parameters": (16 if backward else 8 + 4 * (index - layers)) * MIB,
            "optimizer": 104 * MIB,
            "gradients": (min(done, 3) if backward else max(0, 2 - (index - layers))) * 16 * MIB,
            "gradient_shards": (4 * done if backward else max(0, 24 - 8 * (index - layers))) * MIB,
            "staging": (4 if index % 4 else 0) * MIB,
            "update_scratch": 0,
            "activations": (30 * (layers - index) if backward else 30 * (index - layers + 1)) * MIB,
        }
        seen = {key: int(value * (0.97 + 0.05 * ((index * 7) % 5) / 4)) for key, value in predicted.items()}
        memory.append(SlotMemory(slot, predicted, seen if measured else None))
    return tuple(slots), tuple(memory)


def toy_timelines(world=2, layers=6, measured_memory=True):
    slots, memory = toy_memory(layers, measured_memory)
    predicted, predicted_period = toy_period(layers=layers)
    ranks, periods = zip(*(toy_period(rank, layers, noise=0.12) for rank in range(world)), strict=True)
    unmeasured = tuple(SlotMemory(m.slot, m.predicted) for m in memory)
    return (Timeline(max(periods), slots, tuple(ranks), memory), Timeline(predicted_period, slots, (predicted,), unmeasured))


def toy_times(strategy, scheduler, budget_mib, share):
    """Seconds of a step: compute, plus exposed communication; with a minimum inside of the share's range."""
    quality = {"sequential": 0.0, "priority": 0.8, "memory_aware": 1.0}.get(scheduler, 0.6)
    spread = {"dp": 1.0, "zero2": 0.95, "fsdp": 1.25, "ilp": 0.9}.get(strategy, 1.0)
    share = 0.4 if share is None else share
    room = 1.0 if budget_mib is None else min(1.0, max(0.0, (budget_mib - 400) / 400))
    extra = (0.05 + 0.28 * share**1.8) * (1.3 - room) * (strategy != "dp")
    communication = 0.62 * spread + extra
    compute = 0.95
    reach = quality * (1 - 2.718 ** (-share * 5)) * (0.55 + 0.45 * room)
    overlap = min(communication, compute) * 0.82 * reach
    step = compute + communication - overlap
    return {
        "step_s": step, "compute_s": compute, "communication_s": communication, "overlap_s": overlap,
        "exposed_s": communication - overlap, "stalled_s": step - compute, "idle_s": 0.0,
        "overlap_ratio": overlap / communication, "extra_communication_s": extra,
    }


def write_run(
    folder: Path, strategy="ilp", scheduler="memory_aware", budget_mib: float | None = 640, share: float | None = 0.5, steps=12,
    ending="ok", model="gpt-small", world=2, emulated=True, timelines=False, peak=True, seed=0, times=None, cross_iteration=True,
    settings=None,
):
    """Write a run; `ending` is ok, failed, infeasible (failed before the first step), killed (half a last line)."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"{folder.name}{strategy}{scheduler}{budget_mib}{share}{seed}")
    true = toy_times(strategy, scheduler, budget_mib, share) | (times or {})
    off = 1 + rng.gauss(0, 0.01)
    predicted = {key: value * off for key, value in true.items()}
    peak_bytes = int((budget_mib or 900) * MIB * 0.97)
    _, memory = toy_memory()
    by_category = dict(max(memory, key=lambda m: sum(m.predicted.values())).predicted)
    measured_memory = {key: int(value * 0.98) for key, value in by_category.items()}
    kinds = {"dp": {"AR": 152}, "fsdp": {"RS": 76, "AG_F": 76, "AG_B": 70}}.get(strategy, {"RS": 76, "AG_F": 76})
    sent = {kind: int(mib * MIB) for kind, mib in kinds.items()}
    messages = {kind: int(mib) for kind, mib in kinds.items()}
    job = {
        "event": "job", "schema": SCHEMA, "time": 0.5, "emulated": emulated, "sweep": "toy", "name": folder.name, "world": world,
        "strategy": strategy, "scheduler": scheduler, "model": model, "schedule_share": share, "cross_iteration": cross_iteration,
        "budget_bytes": None if budget_mib is None else int(budget_mib * MIB), "settings": settings or {},
    }  # fmt: skip
    start = {
        "event": "start", "time": 1.0, "plan_hash": f"{abs(hash(str(folder))):x}"[:8], "floor_bytes": 380 * MIB,
        "predicted": {**predicted, "peak_bytes": peak_bytes, "memory": by_category},
    }  # fmt: skip
    lines = [job] if ending == "infeasible" else [job, start]
    measured = []
    for step in range(1, (0 if ending == "infeasible" else steps) + 1):
        factor = 1 + abs(rng.gauss(0, 0.012))
        values = {k: v * factor for k, v in true.items() if k != "extra_communication_s"}
        values["overlap_ratio"] = true["overlap_ratio"]
        warmup = step <= 2
        if not warmup:
            measured.append(values["step_s"])
        lines.append(
            {
                "event": "step", "step": step, "warmup": warmup, "loss": 5.0 / step, **values, "bytes": sent,
                "messages": messages, "throughput_samples_s": 16 / values["step_s"],
                "peak_bytes": int(peak_bytes * 0.99) if peak else None,
            }
        )
    measured.sort()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if ending == "ok":
        quantiles = {name: measured[int(len(measured) * part)] for name, part in (("median", 0.5), ("p10", 0.1), ("p90", 0.9))}
        summary = {
            "event": "summary", "status": "ok", "steps": steps, "step_s": quantiles,
            **{k: v for k, v in true.items() if k != "step_s"},
            "loss": 5.0 / steps, "throughput_samples_s": 16 / quantiles["median"], "bytes": sent, "messages": messages,
            "memory": {
                "predicted": {**by_category, "total": peak_bytes},
                "measured": {**measured_memory, "total": int(peak_bytes * 0.99)} if peak else None,
            },
        }  # fmt: skip
        text += json.dumps(summary) + "\n"
    elif ending == "failed":
        text += json.dumps({"event": "failure", "status": "failed", "reason": "peer closed the connection", "rank": 1, "step": 7})
    elif ending == "infeasible":
        reason = "infeasible: the budget of 384 MiB is below the floor of 402 MiB"
        text += json.dumps({"event": "failure", "status": "failed", "reason": reason, "rank": None, "step": None})
    elif ending == "killed":
        text += '{"event": "step", "step": 13, "warmup": false, "lo'
    (folder / "metrics.jsonl").write_text(text)
    if timelines:
        real, simulated = toy_timelines(world)
        (folder / "timeline.json").write_text(real.to_json())
        (folder / "predicted_timeline.json").write_text(simulated.to_json())
    return folder


@pytest.fixture
def run_writer(tmp_path):
    """Write a run into a folder of that name under the test's sweep; returns the folder."""

    def write(name, **options):
        return write_run(tmp_path / "sweep" / name, **options)

    write.sweep = tmp_path / "sweep"
    return write


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """Shares × budgets × two schedulers, and one job that failed; nobody writes into it."""
    folder, number = tmp_path_factory.mktemp("toy") / "sweep", itertools.count()
    for scheduler in ("memory_aware", "priority"):
        for budget_mib in (480, 640, 800):
            for share in (0.0, 0.25, 0.5, 0.75, 1.0) if budget_mib == 640 else (0.5,):
                write_run(folder / f"{next(number)}", "ilp", scheduler, budget_mib, share, timelines=share == 0.5)
    write_run(folder / f"{next(number)}", "ilp", "priority", 384, 0.5, ending="infeasible")
    return folder


@pytest.fixture(scope="session")
def frame(sweep):
    return analysis.runs(sweep)


@pytest.fixture
def timelines():
    """(measured, predicted) of one period."""
    return toy_timelines()
