"""Runs of elements are boxes of a tensor's own shape; DCP writes them, and whoever knows the plain names reads them."""

from __future__ import annotations

import pickle
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from mdcs.checkpoint import dcp_shards, directory
from mdcs.checkpoint.dcp_shards import TensorShards, boxes, read_checkpoint
from mdcs.checkpoint.directory import RUN, CheckpointError


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_boxes_are_the_run_and_few(shape, data):
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel() - 1))
    stop = data.draw(st.integers(start + 1, whole.numel()))
    places = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in boxes(tuple(shape), start, stop)]
    found = [whole[place].reshape(-1) for place in places]
    assert torch.cat(found).tolist() == [*range(start, stop)]
    assert len(found) <= max(1, 2 * len(shape) - 1)


def in_pieces(whole: torch.Tensor, *cuts: int) -> TensorShards:
    made = TensorShards(whole.shape, whole.dtype)
    for start, stop in zip((0, *cuts), (*cuts, whole.numel()), strict=True):
        made.add(start, whole.reshape(-1)[start:stop].clone())
    return made


def saved(root: Path, leaves: dcp_shards.FlatState, step: int = 1) -> Path:
    """The folder with these tensors."""
    files = {RUN: directory.encode({"step": step, "param_groups": []}, "the run"), directory.rank_file(0): b""}
    folder = directory.folder_of(root, step)
    dcp_shards.wait_for(dcp_shards.save(leaves, dcp_shards.Writer(folder, files), None))
    return folder


@pytest.mark.filterwarnings("ignore")
def test_what_was_cut_in_one_way_is_read_whole_or_cut_in_another(tmp_path):
    weight, scale = torch.randn(5, 6, dtype=torch.float64), torch.tensor(3.0)
    leaves = {("model", "a.weight"): in_pieces(weight, 4, 13), ("model", "a.scale"): in_pieces(scale)}
    folder = saved(tmp_path, leaves)
    into, beside = torch.zeros(30), torch.zeros(9, dtype=torch.float64)
    other = TensorShards(weight.shape, into.dtype)
    other.add(0, into[:9])
    other.add(9, into[9:])
    other.add(0, beside)  # pieces may overlap, and be of other types
    dcp_shards.load(folder, {("model", "a.weight"): other})
    assert torch.equal(into.view(5, 6), weight.float()) and torch.equal(beside, weight.reshape(-1)[:9])
    found = dcp_shards.load_full(folder)["model"]
    assert torch.equal(found["a.weight"], weight) and torch.equal(found["a.scale"], scale)
    plain = {"model": {"a.weight": torch.zeros(5, 6, dtype=torch.float64), "a.scale": torch.tensor(0.0)}}
    dcp.load(plain, checkpoint_id=folder)  # which knows nothing of mdcs
    assert torch.equal(plain["model"]["a.weight"], weight) and plain["model"]["a.scale"] == 3


def test_pieces_of_channels_last_memory_are_of_the_tensor_itself(tmp_path):
    weight = torch.randn(3, 5, 2, 4).to(memory_format=torch.channels_last)
    flat, order = weight.permute(0, 2, 3, 1).reshape(-1), (0, 2, 3, 1)
    made, other, into = (
        TensorShards(weight.shape, weight.dtype, order),
        TensorShards(weight.shape, weight.dtype),
        torch.zeros(120),
    )
    for start, stop in ((0, 7), (7, 61), (61, 120)):
        made.add(start, flat[start:stop].clone())
        other.add(start, into[start:stop])
    folder = saved(tmp_path, {("w",): made})
    plain = {"w": torch.zeros(3, 5, 2, 4)}
    dcp.load(plain, checkpoint_id=folder)
    dcp_shards.load(folder, {("w",): other})
    assert torch.equal(plain["w"], weight) and torch.equal(into.view(3, 5, 2, 4), weight)
    into.zero_()
    back = TensorShards(weight.shape, weight.dtype, order)
    back.add(0, into)
    dcp_shards.load(folder, {("w",): back})
    assert torch.equal(into, flat)


def test_pieces_that_lack_a_part_are_not_read_as_whole(tmp_path):
    folder = saved(tmp_path, {("w",): in_pieces(torch.ones(4))})
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: v"):
        dcp_shards.load(folder, {("v",): torch.zeros(4)})
    with pytest.raises(RuntimeError, match="Size mismatch"):
        dcp_shards.load(folder, {("w",): torch.zeros(5)})


def test_metadata_calls_nothing_that_is_not_a_record_of_a_checkpoint(tmp_path):
    folder = saved(tmp_path, {("w",): torch.ones(4)})
    with (folder / ".metadata").open("wb") as file:
        pickle.dump(print, file)
    with pytest.raises(pickle.UnpicklingError, match="may not name builtins.print"):
        dcp_shards.read_shapes(folder)


def test_the_newest_that_is_whole_is_read(tmp_path):
    for step in (1, 2):
        folder = saved(tmp_path, {("model", "w"): torch.full((3,), float(step))}, step)
    (folder / RUN).write_bytes(b"")
    with pytest.warns(UserWarning, match="not read: .*step-00000002: run.pt has 0 bytes"):
        assert read_checkpoint(tmp_path)["model"]["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="step-00000002: run.pt has 0 bytes"):
        read_checkpoint(folder)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_checkpoint(tmp_path / "nowhere")


def test_a_full_disk_is_the_reason(tmp_path, monkeypatch):
    """Torch's writer has other words for it."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(dcp_shards.shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 0))
    leaves, writer = {("model", "w"): torch.zeros(4)}, dcp_shards.Writer(directory.folder_of(tmp_path, 1), {})

    def fail(*_):
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(dcp_shards.RanksFailed, match="no space left"):
        dcp_shards.wait_for(dcp_shards.save(leaves, writer, None))
