"""Training loops of a GPT-2 with fp32 masters, by engine."""

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
from mdcs.profile.link import Collectives
from mdcs.torch_compat import copy_all
from tests.mdcs.measured import measure_profile

Loop = Callable[[Tensor], Tensor]
"""(tokens) → the loss of one step, without a wait for the device."""
LOSS_SCALE = 2.0**10  # no gradient of the first steps overflows


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements. ``world``: ranks of the emulated one."""

    device: torch.device
    layers: int = 24
    width: int = 1024
    vocabulary: int = 50_304
    sequence: int = 1024
    batch: int = 24
    world: int = 8
    rounds: int = 3
    steps: int = 4

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


FULL = Scale(torch.device("cuda", 0))
SMALL = Scale(torch.device("cpu"), layers=2, width=64, vocabulary=64, sequence=8, batch=1, world=4, rounds=1, steps=2)


@dataclass(frozen=True)
class Variant:
    """A change of the model for every loop: its type, and a change in place."""

    dtype: torch.dtype = torch.bfloat16
    change: Callable[[Any], object] = lambda model: None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.dtype == torch.float16

    def model(self, scale: Scale) -> nn.Module:
        model = model_of(scale, self.dtype)
        self.change(model)
        return model


def model_of(scale: Scale, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a GPT-2. Its weights are the same at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=scale.layers, n_embd=scale.width, n_head=max(1, scale.width // 64), n_positions=scale.sequence,
        vocab_size=scale.vocabulary, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        use_cache=False,
    )  # fmt: skip
    with scale.device:
        model: nn.Module = GPT2LMHeadModel(config)
    return model.to(dtype)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    out: Tensor = model(input_ids=tokens, labels=tokens).loss
    return out


def tokens_of(scale: Scale) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, scale.vocabulary, (scale.batch, scale.sequence), generator=generator).to(scale.device)


@contextmanager
def alone(scale: Scale) -> Iterator[None]:
    """Give the block a process group that has only this process."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if scale.on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[], object], steps: int, device: torch.device) -> float:
    """Return seconds per step, with all work that it gave to the device."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize(device)
    return (time.perf_counter() - begin) / steps


# ---- loops


class Masters:
    """An optimizer of fp32 masters for narrower parameters, as in a plain loop."""

    def __init__(self, model: nn.Module, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self.parameters: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
        self.copies: list[Tensor] = [nn.Parameter(p.detach().float()) for p in self.parameters]
        self.optimizer = optimizer_of(self.copies)

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


def plain(scale: Scale, variant: Variant, wrap: Callable[[nn.Module], nn.Module] = lambda model: model) -> Loop:
    """Return a plain loop: one process. ``wrap``: DDP, for torch's DDP with its default buckets."""
    model = variant.model(scale)
    scaler = torch.amp.GradScaler(scale.device.type, init_scale=LOSS_SCALE, enabled=variant.scales)
    masters, wrapped = Masters(model, scaler), wrap(model)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(wrapped, tokens)
        scaler.scale(loss).backward()
        masters.step()
        return loss.detach()

    return step


def fsdp2(scale: Scale) -> Loop:
    """Return a loop of torch's FSDP2 with a group per block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = model_of(scale).float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = optimizer_of(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(scale: Scale, variant: Variant, tokens: Tensor, stack: ExitStack, strategy: Any, scheduler: Any) -> Loop:
    """Return a loop of mdcs with a plan for one rank."""
    job, scaled = Job(scale, variant.model(scale), tokens), variant.scales
    profile = job.profile(mdcs.Link.uniform(400.0, 10.0, depth=1), 1)
    plan = mdcs.make_plan(mdcs.Job(profile, cross_iteration=not scaled), strategy, scheduler)
    loss_scale = mdcs.LossScale(LOSS_SCALE) if scaled else None
    parallel = stack.enter_context(mdcs.parallelize(job.model, job.optimizer, plan, job.units, loss_scale=loss_scale))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(job.model, tokens)
        parallel.scaled(loss).backward()
        parallel.step()
        return loss.detach()

    return step


class Job:
    """A model with its units, its optimizer and the loss of a batch."""

    def __init__(self, scale: Scale, model: nn.Module, tokens: Tensor) -> None:
        self.scale, self.model, self.optimizer = scale, model, optimizer_of(model.parameters())
        self.units = mdcs.partition(model, mdcs.ByClass(("GPT2Block",)))
        self.loss = partial(loss_of, model, tokens)

    def profile(self, link: mdcs.Link, world: int) -> mdcs.Profile:
        """Measure the profile for a world behind a link."""
        backend = "nccl" if self.scale.on_gpu else "gloo"
        return measure_profile(
            self.model, self.units, self.loss, self.optimizer, world=world, link=link, master_dtype=torch.float32,
            collectives=Collectives.default(backend),
        )  # fmt: skip
