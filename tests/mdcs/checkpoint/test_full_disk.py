"""A full disk is named as such, although torch's writer has other words for it."""

from collections import namedtuple

import pytest
import torch

from mdcs.checkpoint import dcp_shards


def test_a_full_disk_is_the_reason(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(dcp_shards.shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 0))

    def fail(*_):
        raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(dcp_shards.RanksFailed, match="no space left"):
        dcp_shards.wait_for(dcp_shards.save({("model", "w"): torch.zeros(4)}, dcp_shards.Writer(tmp_path, 1, {}, names=()), None))
