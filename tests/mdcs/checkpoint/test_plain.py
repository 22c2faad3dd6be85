"""A checkpoint is read without ranks."""

from __future__ import annotations

import pytest
import torch

from mdcs.checkpoint import aux_state, dcp_shards
from mdcs.checkpoint.dcp_shards import read_checkpoint
from mdcs.checkpoint.directory import CheckpointError


def write(root, state, step=1):
    run = aux_state.encode({"step": step, "param_groups": []}, "the run")
    writer = dcp_shards.Writer(root, step, {aux_state.RUN: run}, names=[aux_state.RUN])
    dcp_shards.wait_for(dcp_shards.save({("model", name): value for name, value in state.items()}, writer, None))


def test_the_newest_that_is_whole_is_read(tmp_path):
    for step in (1, 2):
        write(tmp_path, {"w": torch.full((3,), float(step))}, step)
    (tmp_path / "step-00000002" / aux_state.RUN).write_bytes(b"")
    with pytest.warns(UserWarning, match="not read: .*step-00000002: run.pt has 0 bytes"):
        assert read_checkpoint(tmp_path)["model"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="step-00000002: run.pt has 0 bytes"):
        read_checkpoint(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "nowhere")
