"""The parts of ``mdcs gpu``, a function each: (scale, folder) → rows of figures for gpu.json.

All values are in seconds and bytes. A step's time includes all work that it gave to the device. Candidates take turns.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.planner.ilp.joint import Joint
from mdcs.planner.schedulers.fusion import Fusion
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.greedy import Greedy
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.algorithms import Collectives
from mdcs.telemetry.timeline import Span, intersection, length
from mdcs.torch_compat import copy_all

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements. ``large`` is (layers, width) of the model of the trade-off curve."""

    device: torch.device
    layers: int = 24
    width: int = 1024
    vocabulary: int = 50_304
    sequence: int = 1024
    batch: int = 8
    large: tuple[int, int] = (48, 1600)
    worlds: tuple[int, ...] = (8, 64)
    rates_gbit: tuple[float, ...] = (100.0, 200.0, 400.0)
    rounds: int = 3
    steps: int = 4
    budgets: int = 5
    solver_s: float = 10.0


FULL = Scale(torch.device("cuda", 0))


# ---- the job: GPT-2 in bf16 with fp32 masters


def model_of(scale: Scale, layers: int, width: int) -> nn.Module:
    """A GPT-2 in bf16. Its weights are the same at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=max(1, width // 64), n_positions=scale.sequence, vocab_size=scale.vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    return model.to(scale.device, torch.bfloat16)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out: Tensor = model(input_ids=tokens, labels=tokens).loss
    return out


def tokens_of(scale: Scale) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, scale.vocabulary, (scale.batch, scale.sequence), generator=generator).to(scale.device)


class Masters:
    """An optimizer of fp32 masters for bf16 parameters, as in a plain loop."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.copies: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and copy them to the parameters."""
        for copy, p in zip(self.copies, self.parameters, strict=True):
            assert p.grad is not None
            copy.grad, p.grad = p.grad.float(), None
        self.optimizer.step()
        for copy in self.copies:
            copy.grad = None
        copy_all(self.parameters, self.copies)


@contextmanager
def alone(scale: Scale) -> Iterator[None]:
    """A process group that has only this process."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if scale.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], steps: int, device: torch.device) -> tuple[float, float]:
    """Seconds per step, and the part of them in which the host enqueued the step."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    enqueued = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - begin) / steps, (enqueued - begin) / steps


# ---- parts


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
    """Overhead of every engine over a plain loop: a single rank, over NCCL."""
    tokens = tokens_of(scale)
    with alone(scale), ExitStack() as stack:
        engines = {
            "plain loop": plain(scale, tokens),
            "DDP": ddp(scale, tokens),
            **({"FSDP2": fsdp2(scale, tokens)} if scale.device.type == "cuda" else {}),
            "mdcs, dp + wfbp": ours(scale, tokens, stack, Uniform("dp"), Wfbp()),
            "mdcs, fsdp + priority": ours(scale, tokens, stack, Uniform("fsdp"), Priority()),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for name in list(engines) * (1 + scale.rounds):  # the first round is warm-up
            seconds[name].append(timed(engines[name], scale.steps, scale.device))
        rows = []
        for name, step in engines.items():
            whole, host = (statistics.median(column) for column in zip(*seconds[name][1:], strict=True))
            ratios = [own[0] / base[0] for own, base in zip(seconds[name][1:], seconds["plain loop"][1:], strict=True)]
            trace = traced(step, scale, folder)
            rows.append({
                "engine": name, "step_s": whole, "host_s": host, "over_plain": statistics.median(ratios), "busy": busy(trace),
            })  # fmt: skip
    return rows


def plain(scale: Scale, tokens: Tensor) -> Callable[[], None]:
    """A plain loop: one process, no process group."""
    model = model_of(scale, scale.layers, scale.width)
    masters = Masters(model)

    def step() -> None:
        loss_of(model, tokens).backward()
        masters.step()

    return step


def ddp(scale: Scale, tokens: Tensor) -> Callable[[], None]:
    """torch's DDP with its default buckets."""
    model = model_of(scale, scale.layers, scale.width)
    masters, wrapped = Masters(model), nn.parallel.DistributedDataParallel(model)

    def step() -> None:
        loss_of(wrapped, tokens).backward()
        masters.step()

    return step


def fsdp2(scale: Scale, tokens: Tensor) -> Callable[[], None]:
    """torch's FSDP2 with a group per block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(scale, scale.layers, scale.width).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model)

    def step() -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(scale: Scale, tokens: Tensor, stack: ExitStack, strategy: Any, scheduler: Any) -> Callable[[], None]:
    """mdcs with a plan for one rank."""
    model = model_of(scale, scale.layers, scale.width)
    optimizer, units = optimizer_of(model), units_of(model)
    profile = profile_of(model, units, optimizer, tokens, mdcs.Link.uniform(400.0, 10.0, depth=1), 1)
    plan = mdcs.make_plan(profile, strategy, scheduler)
    parallel = stack.enter_context(mdcs.parallelize(model, optimizer, plan, units))

    def step() -> None:
        loss_of(model, tokens).backward()
        parallel.step()

    return step


def units_of(model: nn.Module) -> list[mdcs.ModelUnit]:
    return mdcs.partition(model, mdcs.ByClass(("GPT2Block",)))


def profile_of(
    model: nn.Module, units: list[mdcs.ModelUnit], optimizer: torch.optim.Optimizer, tokens: Tensor, link: mdcs.Link, world: int
) -> mdcs.Profile:
    backend = "nccl" if tokens.device.type == "cuda" else "gloo"
    return mdcs.measure_profile(
        model, units, lambda: loss_of(model, tokens), optimizer, world=world, link=link, master_dtype=torch.float32,
        collectives=Collectives.default(backend),
    )  # fmt: skip


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
    plan = make(profile_of(model, units, optimizer, tokens, link, world))
    return run(scale, model, optimizer, units, plan, tokens)


def run(
    scale: Scale, model: nn.Module, optimizer: torch.optim.Optimizer, units: list[mdcs.ModelUnit], plan: mdcs.Plan, tokens: Tensor
) -> Row:
    """Train with a plan on its emulated link."""
    assert plan.prediction is not None
    retries = _retries(scale.device)
    with mdcs.parallelize(model, optimizer, plan, units, emulate=mdcs.Emulation(1, plan.world)) as parallel:
        for step in range(2 + scale.steps):
            loss_of(model, tokens).backward()
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
        "plan": f"{plan.strategy} + {plan.scheduler}", "predicted_s": plan.prediction.step_s, "measured_s": seconds,
        "budget": plan.budget, "predicted_bytes": plan.prediction.peak_bytes, "peak_bytes": measured, "reserved_bytes": reserved,
        "pools": pools, "retries": _retries(scale.device) - retries,
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
    link = mdcs.Link.uniform(scale.rates_gbit[0], 15.0, depth=1, emulated=True)
    model = model_of(scale, *scale.large)
    tokens, units, optimizer = tokens_of(scale), units_of(model), optimizer_of(model)
    profile = profile_of(model, units, optimizer, tokens, link, scale.worlds[0])
    floor = mdcs.floor_bytes(mdcs.Job(profile))
    dp = mdcs.make_plan(profile, Uniform("dp"), Wfbp()).prediction
    assert dp is not None
    del model, optimizer
    rows = []
    for k in range(scale.budgets):
        budget = floor + (dp.peak_bytes - floor) * (k + 1) // scale.budgets
        for name, planners in (("greedy + priority", (Greedy(), Priority())), ("joint", (Joint(seconds=scale.solver_s), None))):
            plan = mdcs.make_plan(profile, *planners, budget=budget)
            model = model_of(scale, *scale.large)
            row = run(scale, model, optimizer_of(model), units_of(model), plan, tokens)
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
        plan = mdcs.make_plan(profile_of(model, units, optimizer, tokens, link, scale.worlds[0]), strategy, scheduler)
        with mdcs.parallelize(model, optimizer, plan, units, emulate=mdcs.Emulation(1, plan.world)) as parallel:

            def step(model: nn.Module = model, tokens: Tensor = tokens, parallel: mdcs.Parallel = parallel) -> None:
                loss_of(model, tokens).backward()
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
    return "nccl" in name.lower() or "spin_kernel" in name


