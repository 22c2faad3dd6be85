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
from mdcs.planner.priority import Priority
from mdcs.planner.strategies import RandomMix
from mdcs.profiler.consensus import on_rank_zero
from mdcs.profiler.merging import merge_profiles
from tests.mdcs.measured import measure_profile
from tests.mdcs.runtime.ranks import Ranks

pytestmark = pytest.mark.slow  # their imports take seconds


@contextmanager
def torchrun() -> Iterator[None]:
    """Environment of a rank where torchrun has started it; its process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "TORCHELASTIC_RUN_ID": "test"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with patch.dict(os.environ, given), patch.object(mdcs, "autoplan", quick_plan, create=True):
        yield


def quick_plan(model: Any, optimizer: Any, units: Any, step: Any, *, budget: Any, **job: Any) -> mdcs.Plan:
    """A plan as :func:`mdcs.autoplan` makes one, of a link that is not measured."""
    link = mdcs.Link.uniform(1.0, 50.0)
    profile = merge_profiles(measure_profile(model, units, step, optimizer, world=dist.get_world_size(), link=link, iterations=1))
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


CLIPPED = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("options", [{}, CLIPPED, BY_VALUE], ids=["plain", "clipped", "by value"])
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
        once_more = [trainer.train().training_loss for trainer in (ddp, ours)]
        AcceleratorState._reset_state(reset_partial_state=True)
    return {"losses": (losses, expected), "held out": held_out, "once more": once_more}


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
        assert rank["once more"][0] == pytest.approx(rank["once more"][1], rel=1e-4)


# ---- saving, resuming, the best model

SAVING = {
    "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True,
    "metric_for_best_model": "loss", "label_smoothing_factor": 0.1,
}  # fmt: skip
"""All else as the Trainer has it: clipping, the fused AdamW, checkpoints with the optimizer."""


def saved_by_hugging_face(folder: str) -> dict[str, Any]:
    from accelerate.state import AcceleratorState
    from safetensors.torch import load_file
    from transformers import Trainer

    from examples.hf_trainer import MdcsTrainer, train

    policy = mdcs.ByClass(("GPT2Block",))
    with torchrun():
        ddp, expected = train(Trainer, f"{folder}/ddp", SAVING)
        ours, losses = train(MdcsTrainer, f"{folder}/mdcs", SAVING, policy=policy)
        best = [type(trainer).evaluate(trainer)["eval_loss"] for trainer in (ddp, ours)]
        again, resumed = train(MdcsTrainer, f"{folder}/again", SAVING, f"{folder}/mdcs/checkpoint-3", policy=policy)
        swapped, _ = train(Trainer, f"{folder}/swapped", SAVING, f"{folder}/mdcs/checkpoint-3")
        AcceleratorState._reset_state(reset_partial_state=True)
    files, weights, states = [], [], []
    for kind in ("ddp", "mdcs"):
        saved = Path(folder, kind, "checkpoint-6")
        files.append(sorted(path.name for path in saved.iterdir()))
        weights.append(load_file(saved / "model.safetensors"))
        states.append(torch.load(saved / "optimizer.pt", weights_only=True)["state"])
    moments = [{(i, k): v for i, of in state.items() for k, v in of.items()} for state in states]
    return {
        "losses": (losses, expected),
        "best": best,
        "chosen": [Path(trainer.state.best_model_checkpoint).name for trainer in (ours, ddp)],
        "resumed": resumed == losses,
        "resumed away": away(again.model.state_dict(), ours.model.state_dict()),
        "swapped away": away(swapped.model.state_dict(), ours.model.state_dict()),
        "files": files,
        "weights away": away(*weights),
        "moments away": away(*moments),
    }


def away(some: dict[Any, torch.Tensor], others: dict[Any, torch.Tensor]) -> float:
    assert some.keys() == others.keys()
    return max(float((value - others[name]).abs().max()) for name, value in some.items())


def test_a_hugging_face_trainer_saves_resumes_and_loads_its_best_model(two: Ranks, tmp_path: Path) -> None:
    """A checkpoint is what the plain Trainer writes, and either goes on from it."""
    for rank in two.run(saved_by_hugging_face, str(tmp_path), timeout_s=240):
        ours, ddp = rank["losses"]
        assert ours == pytest.approx(ddp, rel=1e-4) and len(ours) == 8
        assert rank["files"][0] == rank["files"][1] and "optimizer.pt" in rank["files"][1]
        assert rank["weights away"] < 1e-4 and rank["moments away"] < 1e-4
        assert rank["chosen"][0] == rank["chosen"][1] and rank["best"][0] == pytest.approx(rank["best"][1], rel=1e-4)
        assert rank["resumed"] and rank["resumed away"] == 0.0 and rank["swapped away"] < 1e-4


def saved_by_lightning(folder: str) -> dict[str, Any]:
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy

    from examples.lightning_strategy import MdcsStrategy, train

    def saving(kind: str) -> dict[str, Any]:
        """At the end of validation, where all that is done in it is still open."""
        best = ModelCheckpoint(f"{folder}/{kind}", "{epoch}", monitor="held out", save_top_k=-1, save_on_train_epoch_end=False)
        return {"enable_checkpointing": True, "callbacks": [best], "gradient_clip_val": 0.5}

    with torchrun():
        policy = mdcs.ByClass(("Sequential",))
        ddp, _ = train(DDPStrategy(), **saving("ddp"))
        ours, losses = train(MdcsStrategy(policy), **saving("mdcs"))
        again, resumed = train(MdcsStrategy(policy), f"{folder}/mdcs/epoch=0.ckpt", **saving("again"))
    saved = [torch.load(f"{folder}/{kind}/epoch=1.ckpt", weights_only=False) for kind in ("ddp", "mdcs")]
    states = [checkpoint["optimizer_states"][0]["state"] for checkpoint in saved]
    moments = [{(i, k): v for i, of in state.items() for k, v in of.items()} for state in states]
    return {
        "weights away": away(*(checkpoint["state_dict"] for checkpoint in saved)),
        "moments away": away(*moments),
        "resumed": resumed == losses[8:],
        "resumed away": away(again.lightning_module.state_dict(), ours.lightning_module.state_dict()),
    }


def test_lightning_saves_and_resumes(two: Ranks, tmp_path: Path) -> None:
    for rank in two.run(saved_by_lightning, str(tmp_path), timeout_s=240):
        assert rank["weights away"] < 1e-5 and rank["moments away"] < 1e-5
        assert rank["resumed"] and rank["resumed away"] == 0.0


def refused_by_lightning() -> str:
    from examples import lightning_strategy as example

    class Manual(example.Regression):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with torchrun(), patch.object(example, "Regression", Manual), pytest.raises(ValueError) as refusal:
        example.train(example.MdcsStrategy())
    return str(refusal.value)


def test_manual_optimization_is_refused_before_the_first_batch(two: Ranks) -> None:
    assert all("Manual: automatic_optimization=False" in said for said in two.run(refused_by_lightning, timeout_s=120))
