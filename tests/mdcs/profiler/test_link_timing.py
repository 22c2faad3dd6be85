"""Costs of trains, from times made by hand; sent between real ranks in tests/mdcs/runtime/test_communicator.py, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mdcs.profile.link import Collectives, Kind
from mdcs.profiler.link_timing import LinkBenchmark as Trains
from mdcs.profiler.link_timing import _block, _fastest, _larger, _line
from mdcs.sizes import MIB

from ..runtime.ranks import Ranks


def test_gap_and_rate_are_what_is_left_without_disturbances() -> None:
    sizes = MIB // 4, MIB, 4 * MIB
    train = {size: [1e-4 + 8e-9 * size, 1e-3 + 9e-9 * size, 1e-4 + 8e-9 * size] for size in sizes}
    train[MIB // 4] = [seconds * 1.5 for seconds in train[MIB // 4]]  # a short train is disturbed in all turns
    found = _line(train)
    assert found == pytest.approx((1e-4, 8e-9))
    assert _block([found]) == pytest.approx(97 / 3 * 1e-4 / 8e-9, rel=1e-4)


def test_a_link_without_gaps_is_saturated_by_any_block() -> None:
    found = _line({size: [8e-9 * size] for size in (MIB, 4 * MIB)})
    assert found == pytest.approx((0, 8e-9), abs=1e-12)
    assert _block([found]) == 1


def test_the_fastest_is_that_of_the_median_turns_with_several_in_flight_and_one() -> None:
    assert _fastest(beside=[[1.0, 2.0, 2.0], [1.0, 9.0, 1.1]], apart=[[2.0], [2.0]]) == 1
    # Its trains fill the link, with a message that goes the other way; one by one its messages take twice as long.
    assert _fastest(beside=[[0.98], [1.0]], apart=[[1.97], [1.02]]) == 1


@pytest.mark.parametrize(("gbyte", "sizes"), [(100, [4, 16, 64]), (0.1, [4, 16]), (0.01, [])])
def test_larger_messages_are_sent_where_that_is_not_too_long(gbyte: float, sizes: list[int]) -> None:
    per_byte = 1 / (gbyte * 1e9)
    assert [size // MIB for size in _larger(per_byte, torch.device("cuda"))] == sizes
    assert [size // MIB for size in _larger(per_byte, torch.device("cpu"))] == sizes[:1]


# ---- sent between three ranks, where rings have several steps


def gathered_in_turns(orders: list[list[str]]) -> list[list[float]]:
    """Two all-gathers of one train, of different sizes; every rank starts and waits for them in an order of its own."""
    ranks = Trains(torch.device("cpu"))
    messages = {name: ranks.message(Collectives("ring"), Kind.AG_F, size) for name, size in (("a", 96), ("b", 24))}
    running = {}
    for message in messages.values():
        message.buffer.fill_(dist.get_rank())
    for does in orders[dist.get_rank()]:
        name = does[-1]
        if does.startswith("start"):
            running[name] = messages[name].start()
        else:
            running[name].wait()
    return [message.buffer.chunk(3)[r][0].item() for message in messages.values() for r in range(3)]  # type: ignore[misc]


def test_messages_of_a_train_do_not_meet_whatever_step_each_rank_is_at(three: Ranks) -> None:
    one_by_one, together = ["start a", "wait a", "start b", "wait b"], ["start a", "start b", "wait a", "wait b"]
    assert three.run(gathered_in_turns, [one_by_one, together, together]) == [[0, 1, 2, 0, 1, 2]] * 3


def groups_after_an_error() -> int:
    """Number of process groups that an error within nodes leaves behind."""
    before = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(ZeroDivisionError), Trains(torch.device("cpu")).of_nodes(1):
        _ = 1 / 0
    return len(dist.distributed_c10d._world.pg_map) - before


def test_an_error_within_nodes_leaves_no_group(two: Ranks) -> None:
    assert two.run(groups_after_an_error) == [0, 0]
