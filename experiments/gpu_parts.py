"""The parts of ``mdcs gpu``, a function each: (scale, folder) → rows of figures for gpu.json.

All values are in seconds and bytes. A step's time includes all work that it gave to the device. Candidates take turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mdcs
from experiments.gpu_loops import Job, Loop, Scale, Variant, alone, fsdp2, model_of, ours, plain, synchronize, timed, tokens_of
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.uniform import Uniform
from mdcs.telemetry.timeline import Span, intersection, length

Row = dict[str, Any]
LINK = mdcs.Link.uniform(400.0, 15.0, depth=1, emulated=True)
DP_WFBP, FSDP_PRIORITY = (Uniform("dp"), Wfbp()), (Uniform("fsdp"), Priority())


def world_of_one(scale: Scale, folder: Path) -> list[Row]:
    """Overhead of every engine over a plain loop: a single rank, over NCCL."""
    others: dict[str, Callable[[], Loop]] = {"DDP": lambda: plain(scale, Variant(), nn.parallel.DistributedDataParallel)}
    if scale.device.type == "cuda":
        others["FSDP2"] = lambda: fsdp2(scale)
    return _beside_plain(scale, folder, Variant(), others, (DP_WFBP, FSDP_PRIORITY), host=True)


def fp16(scale: Scale, folder: Path) -> list[Row]:
    """fp16 with a loss scale."""
    return _beside_plain(scale, folder, Variant(torch.float16))


def checkpointing(scale: Scale, folder: Path) -> list[Row]:
    """Activation checkpointing by the model's own switch."""

    def change(model: Any) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    return _beside_plain(scale, folder, Variant(change=change))


def compiled(scale: Scale, folder: Path) -> list[Row]:
    """torch.compile of each block."""

    def change(model: Any) -> None:
        for block in model.transformer.h:
            block.compile()

    return _beside_plain(scale, folder, Variant(change=change))


def _beside_plain(
    scale: Scale, folder: Path, variant: Variant, others: dict[str, Callable[[], Loop]] | None = None,
    plans: Sequence[tuple[Any, Any]] = (FSDP_PRIORITY,), *, host: bool = False,
) -> list[Row]:  # fmt: skip
    """A row per engine: its step as a multiple of the plain loop's, and the largest relative difference of losses.

    host: also the seconds of a step whose batch is so small that the device waits for the host (``host_s``), and the share
    of a step in which the device is busy.
    """
    tokens = tokens_of(scale)
    few = tokens[:1, :16]
    with alone(scale), ExitStack() as stack:
        engines = {"plain loop": plain(scale, variant), **{name: make() for name, make in (others or {}).items()}}
        for strategy, scheduler in plans:
            engines[f"mdcs, {strategy.name} + {scheduler.name}"] = ours(scale, variant, tokens, stack, strategy, scheduler)
        # The first steps are warm-up as well.
        losses = {name: [step(tokens).item() for _ in range(scale.steps)] for name, step in engines.items()}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        hosts: dict[str, list[float]] = {name: [] for name in engines}
        for name in list(engines) * scale.rounds:
            seconds[name].append(timed(partial(engines[name], tokens), scale.steps, scale.device))
            if host:
                hosts[name].append(timed(partial(engines[name], few), scale.steps, scale.device))
        rows = []
        for name, step in engines.items():
            base = "plain loop"
            rows.append({
                "engine": name, "step_s": statistics.median(seconds[name]),
                "over_plain": statistics.median(own / one for own, one in zip(seconds[name], seconds[base], strict=True)),
                "losses": max(abs(own / one - 1) for own, one in zip(losses[name], losses[base], strict=True)),
            })  # fmt: skip
            if host:
                kernels = traced(partial(step, tokens), scale, folder)
                rows[-1] |= {"host_s": statistics.median(hosts[name]), "busy": busy(kernels)}
    return rows


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


def overlap(scale: Scale, folder: Path) -> list[Row]:
    """The overlap ratio by mdcs, and by the profiler for the same steps."""
    return [_overlap(scale, folder, *planners) for planners in (DP_WFBP, FSDP_PRIORITY)]


def _overlap(scale: Scale, folder: Path, strategy: Any, scheduler: Any) -> Row:
    job = Job(scale, model_of(scale), tokens_of(scale))
    plan = mdcs.make_plan(job.profile(LINK, scale.world), strategy, scheduler)
    with mdcs.parallelize(job.model, job.optimizer, plan, job.units, emulate=mdcs.Emulation(1, plan.world)) as parallel:

        def step() -> None:
            job.loss().backward()
            parallel.step()

        for _ in range(2):
            step()
        trace = traced(step, scale, folder)
        parallel.drain()
        times = [r.times for r in parallel.records(flush=True)[2:]]
        parallel.close(whole=False)
    communicated = sum(t.communication_s or 0.0 for t in times)
    hidden = sum(t.overlap_s or 0.0 for t in times)
    share = hidden / communicated if communicated else 0.0
    return {"plan": f"{plan.strategy} + {plan.scheduler}", "ours": share, "profiler": hidden_share(trace)}


def allocator(scale: Scale, folder: Path) -> list[Row]:
    """Reserved against requested bytes of a rank, with the allocator's settings in this process's environment."""
    job = Job(scale, model_of(scale), tokens_of(scale))
    plan = mdcs.make_plan(job.profile(LINK, scale.world), *FSDP_PRIORITY)
    retries = _retries(scale.device)
    with mdcs.parallelize(job.model, job.optimizer, plan, job.units, emulate=mdcs.Emulation(1, plan.world)) as parallel:
        for step in range(2 + scale.steps):
            job.loss().backward()
            parallel.step()
            if step == 1:
                parallel.reset_memory()
                if scale.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(scale.device)
        parallel.drain()
        memory = parallel.memory()
        reserved, pools = _reserved(scale.device)
        parallel.close(whole=False)
    return [{
        "plan": f"{plan.strategy} + {plan.scheduler}", "peak_bytes": (memory["measured"] or memory["predicted"])["total"],
        "reserved_bytes": reserved, "pools": pools, "retries": _retries(scale.device) - retries,
    }]  # fmt: skip


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
