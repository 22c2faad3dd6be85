"""A checkpoint is exported for transformers, whose from_pretrained then has what was trained."""

from __future__ import annotations

import pytest
import torch

from mdcs.checkpoint import folder, numbers, pieces
from mdcs.checkpoint.folder import CheckpointError
from mdcs.checkpoint.plain import export_pretrained, read_checkpoint

transformers = pytest.importorskip("transformers")


def write(root, state, step=1):
    partial = folder.begin(root, step)
    pieces.save(partial, {"model": state}, None)
    numbers.save(partial / numbers.RUN, {"step": step, "param_groups": []}, "the run")
    return folder.finish(root, step, folder.sums(partial.iterdir()), world=1)


def small(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def test_from_pretrained_has_what_was_trained(tmp_path):
    trained, other = small(1), small(2)
    write(tmp_path / "made", {f"gpt.{name}": value for name, value in trained.state_dict().items()})
    export_pretrained(tmp_path / "made", other, tmp_path / "exported", prefix="gpt.")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trained.state_dict().items())
    with pytest.raises(CheckpointError, match="has no transformer.wte.weight"):
        export_pretrained(tmp_path / "made", other, tmp_path / "exported")


def test_the_newest_that_is_whole_is_read(tmp_path):
    for step in (1, 2):
        write(tmp_path, {"w": torch.full((3,), float(step))}, step)
    (tmp_path / "step-00000002" / numbers.RUN).write_bytes(b"")
    with pytest.warns(UserWarning, match="not read: .*step-00000002: run.pt has 0 bytes"):
        assert read_checkpoint(tmp_path)["model"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="step-00000002: run.pt has 0 bytes"):
        read_checkpoint(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "nowhere")
