"""Lightning's and Hugging Face's trainers train with a plan of mdcs as they do with DDP."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import mdcs
from mdcs.calibrate.agreement import agree, on_rank_zero
from mdcs.calibrate.slots import measure_profile
from mdcs.planner.schedulers.priority import Priority
from mdcs.planner.strategies.random_mix import RandomMix
from tests.mdcs.runtime.ranks import Ranks

pytestmark = pytest.mark.slow  # their imports take seconds


@contextmanager
def torchrun() -> Iterator[None]:
    """What a rank finds in its environment where torchrun has started it; its process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "test"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with patch.dict(os.environ, given), patch.object(mdcs, "autoplan", quick_plan, create=True):
        yield


def quick_plan(model: Any, optimizer: Any, units: Any, step: Any, *, budget: Any, **job: Any) -> mdcs.Plan:
    """A plan as :func:`mdcs.autoplan` makes one, of a link that is not measured."""
    link = mdcs.Link.uniform(1.0, 50.0)
    profile = agree(measure_profile(model, units, step, optimizer, world=dist.get_world_size(), link=link, iterations=1))
    return on_rank_zero(lambda: mdcs.make_plan(mdcs.Job(profile, **job), RandomMix(3), Priority()))


def lightning(options: dict[str, Any]) -> dict[str, Any]:
    from lightning.pytorch.strategies import DDPStrategy

    from examples.lightning_strategy import MdcsStrategy, train

    with torchrun(), tempfile.TemporaryDirectory() as folder:
        ddp, expected = train(DDPStrategy(), **options)
        strategy = MdcsStrategy(mdcs.ByClass(("Sequential",)))
        saving = {"enable_checkpointing": True, "default_root_dir": folder}
        ours, losses = train(strategy, **options, **saving)
        written = [torch.load(path, weights_only=False) for path in Path(folder).rglob("*.ckpt")]  # by rank 0
    held_out = [float(trainer.callback_metrics["held out"]) for trainer in (ours, ddp)]
    whole = ddp.lightning_module.state_dict()
    states = [ours.lightning_module.state_dict(), *(checkpoint["state_dict"] for checkpoint in written)]
    away = max(float((p - state[name]).abs().max()) for state in states for name, p in whole.items())
    ended = strategy.parallel is None
    return {"losses": (losses, expected), "held out": held_out, "away": away, "ended": ended, "written": len(written)}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}], ids=["plain", "clipped"])
def test_a_lightning_module_trains_as_with_ddp(two: Ranks, options: dict[str, Any]) -> None:
    ranks = two.run(lightning, options, timeout_s=120)
    assert [rank["written"] for rank in ranks] == [1, 0]
    for rank in ranks:
        ours, ddp = rank["losses"]
        assert ours == pytest.approx(ddp, rel=1e-5) and len({*ours}) == 16
        assert rank["held out"][0] == pytest.approx(rank["held out"][1], rel=1e-5)
        assert rank["ended"] and rank["away"] < 1e-5


def hugging_face(options: dict[str, Any]) -> dict[str, Any]:
    from accelerate.state import AcceleratorState
    from transformers import Trainer

    from examples.hf_trainer import MdcsTrainer, train

    with torchrun(), tempfile.TemporaryDirectory() as folder:
        ddp, expected = train(Trainer, folder, options)
        ours, losses = train(MdcsTrainer, folder, options, policy=mdcs.ByClass(("GPT2Block",)))
        held_out = [trainer.evaluate()["eval_loss"] for trainer in (ddp, ours)]
        AcceleratorState._reset_state(reset_partial_state=True)
    return {"losses": (losses, expected), "held out": held_out}


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 0.0}, {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"}],
    ids=["plain", "clipped"],
)
def test_a_hugging_face_trainer_trains_as_with_ddp(two: Ranks, options: dict[str, Any]) -> None:
    for rank in two.run(hugging_face, options, timeout_s=120):
        ours, ddp = rank["losses"]
        assert ours == pytest.approx(ddp, rel=1e-4) and len(ours) >= 4 and ours[-1] < ours[0]
        assert rank["held out"][0] == pytest.approx(rank["held out"][1], rel=1e-4)
