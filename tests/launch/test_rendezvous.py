"""A job's ranks meet before their first collective, however late one of them has started."""

import multiprocessing
import os

import pytest

from launch import rendezvous


def come(port: int, rank: int, seconds: float) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    rendezvous.meet(seconds)


def test_a_late_rank_is_waited_for(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _served, port = rendezvous.serve("127.0.0.1")
    first = multiprocessing.get_context("spawn").Process(target=come, args=(port, 0, 120.0))
    first.start()
    first.join(1.0)
    assert first.is_alive()
    come(port, 1, 120.0)
    first.join(60.0)
    assert first.exitcode == 0


def test_one_that_never_comes_is_named(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _served, port = rendezvous.serve("127.0.0.1")
    with pytest.raises(RuntimeError, match="here/1"):
        come(port, 0, 0.2)
