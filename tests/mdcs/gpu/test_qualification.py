"""Qualifies a machine with a GPU: steps beside a plain loop's, DDP's and FSDP2's, overlap, the allocator.

`make gpu` runs it on one, and shows the figures, in seconds and bytes; docs/results.md describes them. On the CPU the same code
runs on a small scale, and what depends on the device's speed is not judged. Candidates take turns. A step's time includes all
work that it gave to the device.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import mdcs
from mdcs.planner.priority import Priority
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.telemetry.timeline import Span, intersection, length
from tests.mdcs.gpu.loops import (
    FULL,
    SMALL,
    Job,
    Loop,
    Scale,
    Variant,
    alone,
    fsdp2,
    model_of,
    ours,
    plain,
    synchronize,
    timed,
    tokens_of,
)  # fmt: skip

Row = dict[str, Any]
Planners = tuple[Uniform, Wfbp | Priority]
LINK = mdcs.Link.uniform(400.0, 15.0, depth=1, emulated=True)
DP_WFBP: Planners = (Uniform("dp"), Wfbp())
FSDP_PRIORITY: Planners = (Uniform("fsdp"), Priority())
PLANS = [pytest.param(planners, id=f"{planners[0].each}-{planners[1].name}") for planners in (DP_WFBP, FSDP_PRIORITY)]
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(params=[pytest.param(SMALL, marks=pytest.mark.slow, id="cpu"), pytest.param(FULL, marks=ON_GPU, id="gpu")])
def scale(request: pytest.FixtureRequest) -> Iterator[Scale]:
    yield request.param
    gc.collect()
    torch.cuda.empty_cache()


def test_a_world_of_one_takes_as_long_as_a_plain_loop(scale: Scale, tmp_path: Path) -> None:
    """Over NCCL: overhead over the plain loop, and the host's part of a step."""
    others: dict[str, Callable[[], Loop]] = {"DDP": lambda: plain(scale, Variant(), nn.parallel.DistributedDataParallel)}
    if scale.on_gpu:
        others["FSDP2"] = lambda: fsdp2(scale)
    rows = beside_plain(scale, tmp_path, Variant(), others, (DP_WFBP, FSDP_PRIORITY), host=True)
    assert [row["engine"] for row in rows] == ["plain loop", *others, "mdcs, dp + wfbp", "mdcs, fsdp + priority"]
    if scale.on_gpu:
        for row in rows[-2:]:
            assert row["over_plain"] <= 1.02, row
            assert row["host_s"] < 0.9 * row["step_s"], row


def gradient_checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def compiled_blocks(model: Any) -> None:
    for block in model.transformer.h:
        block.compile()


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(Variant(torch.float16), id="fp16 with a loss scale"),
        pytest.param(Variant(change=gradient_checkpointing), id="activation checkpointing"),
        pytest.param(Variant(change=compiled_blocks), id="compiled blocks"),
    ],
)
def test_losses_are_the_plain_loop_s(scale: Scale, tmp_path: Path, variant: Variant) -> None:
    if variant.change is compiled_blocks and not scale.on_gpu:
        pytest.skip("compiling for a CPU takes minutes")
    beside_plain(scale, tmp_path, variant)


@pytest.mark.parametrize("planners", PLANS)
def test_the_overlap_ratio_is_the_profiler_s(scale: Scale, tmp_path: Path, planners: Planners) -> None:
    job = Job(scale, model_of(scale), tokens_of(scale))
    plan = mdcs.make_plan(job.profile(LINK, scale.world), *planners)
    with mdcs.parallelize(job.model, job.optimizer, plan, job.units, emulate=mdcs.Emulation(1, plan.world)) as parallel:

        parallel.records()  # from here on they have times

        def step() -> None:
            job.loss().backward()
            parallel.step()

        for _ in range(2):
            step()
        trace = traced(step, scale, tmp_path)
        parallel.drain()
        times = [r.times for r in parallel.records(flush=True)[2:]]
        parallel.close(whole=False)
    communicated = sum(t.communication_s or 0.0 for t in times)
    ratio = sum(t.overlap_s or 0.0 for t in times) / communicated if communicated else 0.0
    show([{"ours": ratio, "profiler": hidden_share(trace)}])
    if scale.on_gpu:
        assert ratio == pytest.approx(hidden_share(trace), abs=0.05)


def test_the_allocator_frees_no_cache_to_allocate(scale: Scale) -> None:
    """Reserved beside requested bytes of a rank, with the allocator's settings in this process's environment."""
    job = Job(scale, model_of(scale), tokens_of(scale))
    plan = mdcs.make_plan(job.profile(LINK, scale.world), *FSDP_PRIORITY)
    before = retries(scale)
    with mdcs.parallelize(job.model, job.optimizer, plan, job.units, emulate=mdcs.Emulation(1, plan.world)) as parallel:
        for step in range(2 + scale.steps):
            job.loss().backward()
            parallel.step()
            if step == 1:
                parallel.reset_memory()
                if scale.on_gpu:
                    torch.cuda.reset_peak_memory_stats(scale.device)
        parallel.drain()
        memory = parallel.memory()
        reserved, pools = reserved_by_stream(scale)
        parallel.close(whole=False)
    requested = (memory["measured"] or memory["predicted"])["total"]
    assert requested > 0
    show([{"requested": requested, "reserved": reserved, "pools": pools, "retries": retries(scale) - before}])
    assert retries(scale) == before


def beside_plain(
    scale: Scale, folder: Path, variant: Variant, others: dict[str, Callable[[], Loop]] | None = None,
    plans: Sequence[Planners] = (FSDP_PRIORITY,), *, host: bool = False,
) -> list[Row]:  # fmt: skip
    """A row per engine: its step as a multiple of the plain loop's, and the largest relative difference of losses.

    host: also the seconds of a step whose batch is so small that the device waits for the host (``host_s``), and the share
    of a step in which the device is busy. Fails where a loss of mdcs is another than the plain loop's.
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
        rows, base = list[Row](), "plain loop"
        for name, step in engines.items():
            rows.append({
                "engine": name, "step_s": statistics.median(seconds[name]),
                "over_plain": statistics.median(own / one for own, one in zip(seconds[name], seconds[base], strict=True)),
                "losses": max(abs(own / one - 1) for own, one in zip(losses[name], losses[base], strict=True)),
            })  # fmt: skip
            if host:
                kernels = traced(partial(step, tokens), scale, folder)
                rows[-1] |= {"host_s": statistics.median(hosts[name]), "busy": busy(kernels)}
    show(rows)
    assert all(row["losses"] <= 0.005 for row in rows if row["engine"].startswith("mdcs"))
    return rows


def show(rows: list[Row]) -> None:
    """Print figures, which pytest -rP shows."""
    print(pd.DataFrame(rows).to_string(index=False))


def retries(scale: Scale) -> int:
    return int(torch.cuda.memory_stats(scale.device).get("num_alloc_retries", 0)) if scale.on_gpu else 0


def reserved_by_stream(scale: Scale) -> tuple[int, list[int]]:
    """Peak bytes that the allocator has reserved, and bytes reserved now, by stream."""
    if not scale.on_gpu:
        return 0, []
    pools: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        pools[segment["stream"]] = pools.get(segment["stream"], 0) + segment["total_size"]
    return torch.cuda.max_memory_reserved(scale.device), sorted(pools.values(), reverse=True)


# ---- torch.profiler's traces

Kernel = tuple[str, Span]


def traced(step: Callable[[], object], scale: Scale, folder: Path) -> list[Kernel]:
    """Kernels that ran on the device in a few steps: names, with begin and end in seconds."""
    from torch.profiler import ProfilerActivity, profile

    if not scale.on_gpu:
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
    sent = [span for name, span in kernels if communicates(name)]
    computed = [span for name, span in kernels if not communicates(name)]
    return length(intersection(sent, computed)) / length(sent) if sent else 0.0


def communicates(name: str) -> bool:
    return "nccl" in name.lower() or "spin_kernel" in name or "mdcs_pause" in name


def test_overlap_in_a_trace() -> None:
    """Two seconds of NCCL, one of them beside a kernel; copies are computation, what the host does is neither."""
    event = {"ph": "X", "cat": "kernel"}
    trace = {"traceEvents": [
        {**event, "name": "ncclDevKernel_AllGather", "ts": 0, "dur": 2e6},
        {**event, "name": "gemm", "ts": 1e6, "dur": 0.5e6},
        {**event, "name": "Memcpy", "cat": "gpu_memcpy", "ts": 1.5e6, "dur": 1.5e6},
        {**event, "name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 9e6},
        {**event, "name": "gemm", "ts": 4e6, "dur": 1e6},
    ]}  # fmt: skip
    kernels = kernels_of(trace)
    assert hidden_share(kernels) == pytest.approx(0.5)
    assert busy(kernels) == pytest.approx(0.8)
    assert hidden_share([]) == busy([]) == 0.0
