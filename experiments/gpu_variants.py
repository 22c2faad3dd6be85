"""More parts of ``mdcs gpu``: what people do to a model, beside a plain loop that does it, and a ResNet."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import mdcs
from experiments.gpu_job import Masters, Scale, alone, loss_of, model_of, optimizer_of, profile_of, timed, tokens_of, units_of
from experiments.gpu_parts import run
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.schedulers.wfbp import Wfbp
from mdcs.planner.strategies.uniform import Uniform

Row = dict[str, object]
LINK = mdcs.Link.uniform(100.0, 15.0, depth=1, emulated=True)
SCALE = 2.0**10  # of the loss: no gradient of the first steps overflows


def fp16(scale: Scale, folder: Path) -> list[Row]:
    """fp16 with a loss scale."""
    return _beside_plain(scale, "fp16, loss scale", torch.float16, lambda model: None)


def checkpointing(scale: Scale, folder: Path) -> list[Row]:
    """Activation checkpointing by the model's own switch."""

    def change(model: nn.Module) -> None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]

    return _beside_plain(scale, "activation checkpointing", torch.bfloat16, change)


def compiled(scale: Scale, folder: Path) -> list[Row]:
    """torch.compile of each block."""

    def change(model: nn.Module) -> None:
        for block in model.transformer.h:  # type: ignore[union-attr]
            block.compile()

    return _beside_plain(scale, "compiled blocks", torch.bfloat16, change)


def _beside_plain(scale: Scale, name: str, dtype: torch.dtype, change: Callable[[nn.Module], None]) -> list[Row]:
    """Step time as a multiple of a plain loop's, and the largest relative difference of losses."""
    tokens = tokens_of(scale)
    with alone(scale), ExitStack() as stack:
        model = model_of(scale, scale.layers, scale.width, dtype)
        change(model)
        scaler = torch.amp.GradScaler(scale.device.type, init_scale=SCALE, enabled=dtype == torch.float16)
        masters = Masters(model, scaler)

        def plain() -> Tensor:
            loss = loss_of(model, tokens)
            scaler.scale(loss).backward()
            masters.step()
            return loss.detach()

        own = model_of(scale, scale.layers, scale.width, dtype)
        change(own)
        optimizer, units = optimizer_of(own), units_of(own)
        link = mdcs.Link.uniform(400.0, 10.0, depth=1)
        profile = profile_of(own, units, optimizer, partial(loss_of, own, tokens), link, 1)
        plan = mdcs.make_plan(mdcs.Job(profile, cross_iteration=not scaler.is_enabled()), Uniform("fsdp"), Priority())
        parallel = stack.enter_context(
            mdcs.parallelize(own, optimizer, plan, units, loss_scale=mdcs.LossScale(SCALE) if scaler.is_enabled() else None)
        )

        def ours() -> Tensor:
            loss = loss_of(own, tokens)
            parallel.scaled(loss).backward()
            parallel.step()
            return loss.detach()

        losses = [(plain(), ours()) for _ in range(scale.steps)]
        worst = max(abs(b.item() / a.item() - 1) for a, b in losses)
        pairs = [(timed(plain, scale.steps, scale.device), timed(ours, scale.steps, scale.device)) for _ in range(scale.rounds)]
    return [{
        "what": name, "plan": f"{plan.strategy} + {plan.scheduler}", "plain_s": statistics.median(a for a, _ in pairs),
        "step_s": statistics.median(b for _, b in pairs), "over_plain": statistics.median(b / a for a, b in pairs),
        "losses": worst,
    }]  # fmt: skip


def resnet(scale: Scale, folder: Path) -> list[Row]:
    """Memory of ResNet-152 with dp and fsdp, in full and in mixed precision: batches of 16 images of 3 × 80 × 80."""
    from transformers import ResNetConfig, ResNetForImageClassification

    rows = []
    depths, sizes = scale.stages
    for dtype in (torch.float32, torch.bfloat16):
        for strategy, scheduler in ((Uniform("dp"), Wfbp()), (Uniform("fsdp"), Priority())):
            torch.manual_seed(0)
            with scale.device:
                config = ResNetConfig(depths=depths, hidden_sizes=sizes, num_labels=1000)  # type: ignore[call-arg]
                model: nn.Module = ResNetForImageClassification(config)
                model = model.to(dtype)
                images, labels = torch.randn(16, 3, 80, 80, dtype=dtype), torch.randint(0, 1000, (16,))

            def loss(model: nn.Module = model, images: Tensor = images, labels: Tensor = labels) -> Tensor:
                out: Tensor = nn.functional.cross_entropy(model(images).logits.float(), labels)
                return out

            optimizer = optimizer_of(model)
            units = mdcs.partition(model, mdcs.ByClass(("ResNetBottleNeckLayer",)))
            plan = mdcs.make_plan(profile_of(model, units, optimizer, loss, LINK, scale.worlds[0]), strategy, scheduler)
            precision = "fp32" if dtype == torch.float32 else "bf16, fp32 masters"
            rows.append({"precision": precision, "world": plan.world, **run(scale, model, optimizer, units, plan, loss)})
            del model, optimizer, units, loss
    return rows
