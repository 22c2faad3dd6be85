"""The job of ``experiments/gpu.py``: a GPT-2 in bf16 with fp32 masters, and its training loops, by engine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.profile.algorithms import Collectives
from mdcs.torch_compat import copy_all


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements.

    - ``large``: (layers, width, batch) of the trade-off curve.
    - ``stages``: (blocks, channels) of the ResNet's stages.
    """

    device: torch.device
    layers: int = 24
    width: int = 1024
    vocabulary: int = 50_304
    sequence: int = 1024
    batch: int = 24
    large: tuple[int, int, int] = (48, 1600, 8)
    stages: tuple[list[int], list[int]] = ([3, 8, 36, 3], [256, 512, 1024, 2048])
    worlds: tuple[int, ...] = (8, 64)
    rates_gbit: tuple[float, ...] = (100.0, 200.0, 400.0)
    rounds: int = 3
    steps: int = 4
    budgets: int = 5
    solver_s: float = 10.0


FULL = Scale(torch.device("cuda", 0))


# ---- model, data, optimizer


def model_of(scale: Scale, layers: int, width: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A GPT-2. Its weights are the same at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=max(1, width // 64), n_positions=scale.sequence, vocab_size=scale.vocabulary,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip
    with scale.device:
        model: nn.Module = GPT2LMHeadModel(config)
    return model.to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out: Tensor = model(input_ids=tokens, labels=tokens).loss
    return out


def tokens_of(scale: Scale) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, scale.vocabulary, (scale.batch, scale.sequence), generator=generator).to(scale.device)


class Masters:
    """An optimizer of fp32 masters for narrower parameters, as in a plain loop."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler | None = None) -> None:
        self.scaler = scaler or torch.amp.GradScaler(enabled=False)
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.copies: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=1e-4, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update the masters, and copy them to the parameters."""
        for copy, p in zip(self.copies, self.parameters, strict=True):
            assert p.grad is not None
            copy.grad, p.grad = p.grad.float(), None
        self.scaler.step(self.optimizer)
        self.scaler.update()
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


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Seconds per step, with all work that it gave to the device."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps


# ---- loops


Loop = Callable[[Tensor], None]
"""(tokens) → one step."""


def plain(scale: Scale) -> Loop:
    """A plain loop: one process, no process group."""
    model = model_of(scale, scale.layers, scale.width)
    masters = Masters(model)

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        masters.step()

    return step


def ddp(scale: Scale) -> Loop:
    """torch's DDP with its default buckets."""
    model = model_of(scale, scale.layers, scale.width)
    masters, wrapped = Masters(model), nn.parallel.DistributedDataParallel(model)

    def step(tokens: Tensor) -> None:
        loss_of(wrapped, tokens).backward()
        masters.step()

    return step


def fsdp2(scale: Scale) -> Loop:
    """torch's FSDP2 with a group per block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(scale, scale.layers, scale.width).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model)

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(scale: Scale, tokens: Tensor, stack: ExitStack, strategy: Any, scheduler: Any) -> Loop:
    """mdcs with a plan for one rank."""
    model = model_of(scale, scale.layers, scale.width)
    optimizer, units = optimizer_of(model), units_of(model)
    profile = profile_of(model, units, optimizer, partial(loss_of, model, tokens), mdcs.Link.uniform(400.0, 10.0, depth=1), 1)
    plan = mdcs.make_plan(profile, strategy, scheduler)
    parallel = stack.enter_context(mdcs.parallelize(model, optimizer, plan, units))

    def step(tokens: Tensor) -> None:
        loss_of(model, tokens).backward()
        parallel.step()

    return step


def units_of(model: nn.Module) -> list[mdcs.ModelUnit]:
    return mdcs.partition(model, mdcs.ByClass(("GPT2Block",)))


def profile_of(
    model: nn.Module, units: list[mdcs.ModelUnit], optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor],
    link: mdcs.Link, world: int, *, recompute: bool = False,
) -> mdcs.Profile:  # fmt: skip
    backend = "nccl" if next(model.parameters()).device.type == "cuda" else "gloo"
    return mdcs.measure_profile(
        model, units, loss, optimizer, world=world, link=link, master_dtype=torch.float32,
        collectives=Collectives.default(backend), recompute=recompute,
    )  # fmt: skip
