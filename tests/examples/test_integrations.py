"""PEFT, and what others put around a model: they keep their lines, and training is as with DDP."""

from __future__ import annotations

import functools
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from tests.mdcs.runtime.ranks import Ranks

pytestmark = pytest.mark.slow  # their imports take seconds
QUICK = functools.partial(mdcs.parallelize, seconds=0.5, progress=False, timeout_s=100)


def adapters(lora: dict[str, Any]) -> list[tuple[list[float], float]]:
    from examples.peft_lora import train

    folders = [[tempfile.mkdtemp(), tempfile.mkdtemp()]]
    dist.broadcast_object_list(folders)
    # gloo's own collectives, the first of the two families, look faster: with them 80% does not fit
    with patch.object(mdcs, "parallelize", QUICK):
        return [train(folder, ours=ours, **lora) for folder, ours in zip(folders[0], (True, False), strict=True)]


LORA: dict[str, dict[str, Any]] = {
    "LoRA": {"bias": "lora_only"},
    "DoRA": {"use_dora": True},
    "modules_to_save": {"use_rslora": True, "modules_to_save": ["lm_head"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", LORA.values(), ids=LORA)
def test_adapters_train_as_with_ddp_and_are_saved_by_peft(two: Ranks, lora: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    for ours, ddp in two.run(adapters, lora, timeout_s=400):
        assert ours == ddp and len(ddp[0]) == 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(self.wide(self.norm(x)).relu())


def compiled(what: str, when: str, ours: bool) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), *(Block() for _ in range(3)), nn.Linear(16, 4))
    model: Any = plain
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    if when == "before" and what == "model":
        model = torch.compile(model, backend="aot_eager")
    for block in plain[1:4] if what == "blocks" else ():
        if when == "before":
            block.compile(backend="aot_eager")
    run = QUICK(model, optimizer, budget="floor+5%") if ours else nn.parallel.DistributedDataParallel(plain)
    for block in plain[1:4] if what == "blocks" else ():
        if when == "after":
            block.compile(backend="aot_eager")
    if when == "after" and what == "model":
        model = torch.compile(model, backend="aot_eager")
    losses = []
    for step in range(5):
        x = torch.rand(4, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model if ours else run)(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if ours:
        run.close()
    return losses


def compiled_and_plain(what: str, when: str) -> tuple[list[float], list[float]]:
    return compiled(what, when, True), compiled("nothing", when, False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_what_is_compiled_before_or_after_trains_as_with_ddp(two: Ranks, what: str, when: str) -> None:
    for ours, ddp in two.run(compiled_and_plain, what, when, timeout_s=200):
        assert ours == pytest.approx(ddp, rel=1e-5)
