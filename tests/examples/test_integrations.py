"""PEFT, and what others put around a model: they keep their lines, and training is as with DDP."""

from __future__ import annotations

import functools
import tempfile
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import mdcs
from tests.mdcs.runtime.ranks import Ranks

pytestmark = pytest.mark.slow  # their imports take seconds
QUICK = functools.partial(mdcs.parallelize, seconds=0.5, progress=False, timeout_s=100)


def adapters(lora: dict[str, Any]) -> list[tuple[list[float], float]]:
    from examples.peft_lora import train

    folders = [[tempfile.mkdtemp(), tempfile.mkdtemp()]]
    dist.broadcast_object_list(folders)
    with patch.object(mdcs, "parallelize", QUICK):
        return [train(folder, ours=ours, **lora) for folder, ours in zip(folders[0], (True, False), strict=True)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True, "bias": "lora_only"}], ids=["LoRA", "rsLoRA with biases"])
def test_adapters_train_as_with_ddp_and_are_saved_by_peft(two: Ranks, lora: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    for ours, ddp in two.run(adapters, lora, timeout_s=400):
        assert ours == ddp and len(ddp[0]) == 20
