"""A job's ranks meet before their first collective, however late one of them has started."""

import threading

import pytest

from launch import rendezvous


def test_a_late_rank_is_waited_for():
    _served, port = rendezvous.serve("127.0.0.1")
    met, late = [], threading.Event()

    def come(rank: int) -> None:
        rendezvous.meet(rendezvous.join("127.0.0.1", port), rank, 2, 60.0)
        met.append((rank, late.is_set()))

    first = threading.Thread(target=come, args=(0,))
    first.start()
    first.join(0.5)
    assert first.is_alive()
    late.set()
    come(1)
    first.join(60.0)
    assert sorted(met) == [(0, True), (1, True)]


def test_one_that_never_comes_is_named():
    _served, port = rendezvous.serve("127.0.0.1")
    with pytest.raises(RuntimeError, match="here/1"):
        rendezvous.meet(rendezvous.join("127.0.0.1", port), 0, 2, 0.2)
