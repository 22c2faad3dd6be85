"""The parts of ``mdcs gpu``, a function each: (scale, folder) → rows of figures for gpu.json.

All values are in seconds and bytes. A step's time includes all work that it gave to the device. Candidates take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

import mdcs
from experiments.gpu_job import (
    Scale,
    alone,
    ddp,
    fsdp2,
    loss_of,
    model_of,
    optimizer_of,
    ours,
    plain,
    profile_of,
    synchronize,
    timed,
    tokens_of,
    units_of,
)
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.schedulers.fusion import Fusion
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.telemetry.timeline import Span, intersection, length

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]


def tests(scale: Scale, folder: Path) -> list[Row]:
    """Run the tests marked gpu, among them two ranks on one GPU."""
    xml = folder / "tests.xml"
    options = ["-m", "gpu", "-o", "addopts=", "-rA", f"--junitxml={xml.resolve()}", "tests/mdcs/runtime/test_cuda.py"]
    subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT, check=False)  # the file has the failures
    if not xml.exists():
        raise RuntimeError("pytest has written no results")
    return [counts(xml, "tests on the GPU"), counts(xml, "two ranks on one GPU train as one", "two_ranks")]


def counts(xml: Path, what: str, of: str = "") -> Row:
    """Count passed, failed and skipped tests in a JUnit file, of the tests whose name contains ``of``."""
    row: Row = {"what": what, "passed": 0, "failed": 0, "skipped": 0}
    for case in ElementTree.parse(xml).iter("testcase"):
        if of in case.get("name", ""):
            tags = {child.tag for child in case}
            row["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return row


def world_of_one(scale: Scale, folder: Path) -> list[Row]:
    """Overhead of every engine over a plain loop: a single rank, over NCCL.

    ``host_s``: seconds of a step whose batch is so small that the device waits for the host.
    """
    tokens = tokens_of(scale)
    few = tokens[:1, :16]
    with alone(scale), ExitStack() as stack:
        engines = {
            "plain loop": plain(scale),
            "DDP": ddp(scale),
            **({"FSDP2": fsdp2(scale)} if scale.device.type == "cuda" else {}),
            "mdcs, dp + wfbp": ours(scale, tokens, stack, Uniform("dp"), Wfbp()),
            "mdcs, fsdp + priority": ours(scale, tokens, stack, Uniform("fsdp"), Priority()),
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        hosts: dict[str, list[float]] = {name: [] for name in engines}
        for name in list(engines) * (1 + scale.rounds):  # the first round is warm-up
            for batch, measured in ((tokens, seconds), (few, hosts)):
                measured[name].append(timed(partial(engines[name], batch), scale.steps, scale.device))
        rows = []
        for name, step in engines.items():
            ratios = [own / base for own, base in zip(seconds[name][1:], seconds["plain loop"][1:], strict=True)]
            rows.append({
                "engine": name, "step_s": statistics.median(seconds[name][1:]), "host_s": statistics.median(hosts[name][1:]),
                "over_plain": statistics.median(ratios), "busy": busy(traced(partial(step, tokens), scale, folder)),
            })  # fmt: skip
    return rows


def worlds(scale: Scale, folder: Path) -> list[Row]:
    """Predicted and measured step time and peak, with this process as a rank of emulated worlds."""
    rows = []
    for world in scale.worlds:
        for rate in scale.rates_gbit:
            link = mdcs.Link.uniform(rate, 15.0, depth=1, emulated=True)
            for strategy, scheduler in ((Uniform("fsdp"), Priority()), (Uniform("zero2"), Fusion())):

                def make(profile: mdcs.Profile, strategy: Any = strategy, scheduler: Any = scheduler) -> mdcs.Plan:
                    budget = mdcs.make_plan(profile, strategy, scheduler).prediction.peak_bytes  # type: ignore[union-attr]
                    return mdcs.make_plan(profile, strategy, scheduler, budget=budget)

                model = model_of(scale, scale.layers, scale.width)
                row = emulated(scale, model, link, world, make)
                rows.append({"world": world, "rate_gbit": rate, **row})
    return rows


def emulated(scale: Scale, model: nn.Module, link: mdcs.Link, world: int, make: Callable[[mdcs.Profile], mdcs.Plan]) -> Row:
    """Run a few steps of rank 1 of the world, and return them with the prediction."""
    tokens, units, optimizer = tokens_of(scale), units_of(model), optimizer_of(model)
    loss = partial(loss_of, model, tokens)
    return run(scale, model, optimizer, units, make(profile_of(model, units, optimizer, loss, link, world)), loss)


def run(
    scale: Scale, model: nn.Module, optimizer: torch.optim.Optimizer, units: list[mdcs.ModelUnit], plan: mdcs.Plan,
    loss: Callable[[], Tensor],
) -> Row:  # fmt: skip
    """Train with a plan on its emulated link."""
    assert plan.prediction is not None
    retries = _retries(scale.device)
    with mdcs.parallelize(model, optimizer, plan, units, emulate=mdcs.Emulation(1, plan.world)) as parallel:
        for step in range(2 + scale.steps):
            loss().backward()
            parallel.step()
            if step == 1:
                parallel.reset_memory()
                if scale.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(scale.device)
        parallel.drain()
        seconds = statistics.median(r.times.step_s for r in parallel.records(flush=True)[2:])
        memory = parallel.memory()
        reserved, pools = _reserved(scale.device)
        parallel.close(whole=False)
    measured = (memory["measured"] or memory["predicted"])["total"]
    return {
        "plan": f"{plan.strategy} + {plan.scheduler}", "messages": len(plan.messages), "budget": plan.budget,
        "predicted_s": plan.prediction.step_s, "measured_s": seconds, "predicted_bytes": plan.prediction.peak_bytes,
        "peak_bytes": measured, "reserved_bytes": reserved, "pools": pools, "retries": _retries(scale.device) - retries,
    }  # fmt: skip


def _retries(device: torch.device) -> int:
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def _reserved(device: torch.device) -> tuple[int, list[int]]:
    """Peak bytes that the allocator has reserved, and bytes reserved now, by stream."""
    if device.type != "cuda":
        return 0, []
    pools: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pools[segment["stream"]] = pools.get(segment["stream"], 0) + segment["total_size"]
    return torch.cuda.max_memory_reserved(device), sorted(pools.values(), reverse=True)


def curve(scale: Scale, folder: Path) -> list[Row]:
    """Step time over budgets from the floor to the peak of all dp, for heuristics and for the joint plan."""
    planners = {"greedy + priority": (Greedy(), Priority()), "joint": (Joint(seconds=scale.solver_s), None)}
    return _curve(scale, folder, planners, "none")


def recompute(scale: Scale, folder: Path) -> list[Row]:
    """The same with a joint plan that may recompute activations, from its own floor."""
    return _curve(scale, folder, {"joint, recomputing": (Joint(seconds=scale.solver_s), None)}, "planned")


def _curve(scale: Scale, folder: Path, planners: dict[str, tuple[Any, Any]], rule: str) -> list[Row]:
    layers, width, batch = scale.large
    scale = replace(scale, layers=layers, width=width, batch=batch)
    link = mdcs.Link.uniform(scale.rates_gbit[0], 15.0, depth=1, emulated=True)
    model, tokens = model_of(scale, layers, width), tokens_of(scale)
    units, optimizer = units_of(model), optimizer_of(model)
    loss = partial(loss_of, model, tokens)
    profile = profile_of(model, units, optimizer, loss, link, scale.worlds[0], recompute=rule != "none")
    (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")
    floor = mdcs.floor_bytes(mdcs.Job(profile), rule)
    dp = mdcs.make_plan(profile, Uniform("dp"), Wfbp()).prediction
    assert dp is not None
    del model, optimizer, units, loss  # their memory is that of the plans below
    rows = []
    for k in range(scale.budgets):
        budget = floor + (dp.peak_bytes - floor) * k**2 // (scale.budgets - 1) ** 2  # close to each other near the floor
        for name, (strategy, scheduler) in planners.items():
            plan = mdcs.make_plan(profile, strategy, scheduler, budget=budget, recompute=rule)
            model = model_of(scale, layers, width)
            row = run(scale, model, optimizer_of(model), units_of(model), plan, partial(loss_of, model, tokens))
            rows.append({"planner": name, "world": profile.world, **row})
            (folder / "so-far.json").write_text(json.dumps(rows), encoding="utf-8")
    return rows


def overlap(scale: Scale, folder: Path) -> list[Row]:
    """The overlap ratio by mdcs, and by the profiler for the same steps."""
    link = mdcs.Link.uniform(scale.rates_gbit[-1], 15.0, depth=1, emulated=True)
    rows = []
    for strategy, scheduler in ((Uniform("dp"), Wfbp()), (Uniform("fsdp"), Priority())):
        model = model_of(scale, scale.layers, scale.width)
        tokens, units, optimizer = tokens_of(scale), units_of(model), optimizer_of(model)
        loss = partial(loss_of, model, tokens)
        plan = mdcs.make_plan(profile_of(model, units, optimizer, loss, link, scale.worlds[0]), strategy, scheduler)
        with mdcs.parallelize(model, optimizer, plan, units, emulate=mdcs.Emulation(1, plan.world)) as parallel:

            def step(loss: Callable[[], Tensor] = loss, parallel: mdcs.Parallel = parallel) -> None:
                loss().backward()
                parallel.step()

            for _ in range(2):
                step()
            trace = traced(step, scale, folder)
            parallel.drain()
            times = [r.times for r in parallel.records(flush=True)[2:]]
            parallel.close(whole=False)
        communicated = sum(t.communication_s or 0.0 for t in times)
        hidden = sum(t.overlap_s or 0.0 for t in times)
        rows.append({
            "plan": f"{plan.strategy} + {plan.scheduler}", "ours": hidden / communicated if communicated else 0.0,
            "profiler": hidden_share(trace),
        })  # fmt: skip
    return rows


def allocator(scale: Scale, folder: Path) -> list[Row]:
    """Reserved against requested bytes, with the allocator's settings in this process's environment."""
    link = mdcs.Link.uniform(scale.rates_gbit[-1], 15.0, depth=1, emulated=True)
    model = model_of(scale, scale.layers, scale.width)
    return [emulated(scale, model, link, scale.worlds[0], lambda profile: mdcs.make_plan(profile, Uniform("fsdp"), Priority()))]


# ---- torch.profiler's traces

Kernel = tuple[str, Span]


def traced(step: Callable[[], object], scale: Scale, folder: Path) -> list[Kernel]:
    """Kernels that ran on the device in a few steps: names, with begin and end in seconds."""
    from torch.profiler import ProfilerActivity, profile

    if scale.device.type != "cuda":
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(scale.steps):
            step()
        synchronize(scale.device)
    path = folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    return kernels_of(json.loads(path.read_text(encoding="utf-8")))


def kernels_of(trace: dict[str, Any]) -> list[Kernel]:
    """The kernels in a Chrome trace."""
    return [
        (e["name"], (e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6))
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]


def busy(kernels: Sequence[Kernel]) -> float:
    """Share of the time from the first kernel to the last in which the device is busy."""
    spans = [span for _, span in kernels]
    whole = max((end for _, end in spans), default=0.0) - min((begin for begin, _ in spans), default=0.0)
    return length(spans) / whole if whole else 0.0


def hidden_share(kernels: Sequence[Kernel]) -> float:
    """Time in which communication and compute both run, over the time of communication. HTA defines overlap this way.

    Communication is NCCL's kernels, and the kernel that stands for an emulated link.
    """
    sent = [span for name, span in kernels if _communicates(name)]
    computed = [span for name, span in kernels if not _communicates(name)]
    return length(intersection(sent, computed)) / length(sent) if sent else 0.0


def _communicates(name: str) -> bool:
    return "nccl" in name.lower() or "spin_kernel" in name or "mdcs_pause" in name
