"""What trains come to, from times made by hand; sent between real ranks in tests/mdcs/runtime/test_communicator.py."""

from __future__ import annotations

import pytest
import torch

from mdcs.calibrate.link_timing import Timing, _block, _fastest, _is_near, _larger, _lines
from mdcs.profile.algorithms import Collectives
from mdcs.sizes import MIB


def timing(algorithm: str, samples: dict[int, list[float]]) -> Timing:
    """Of an all-gather."""
    return Timing("all_gather", Collectives(all_gather=algorithm), samples)


def test_gap_and_rate_are_what_is_left_without_disturbances() -> None:
    sizes = MIB // 4, MIB, 4 * MIB
    trains = {size: [1e-4 + 8e-9 * size, 1e-3 + 9e-9 * size, 1e-4 + 8e-9 * size] for size in sizes}
    trains[MIB // 4] = [seconds * 1.5 for seconds in trains[MIB // 4]]  # a short train is disturbed in all turns
    (found,) = _lines([timing("ring", trains)]).values()
    assert found == pytest.approx((1e-4, 8e-9))
    assert _block({"all_gather": found}) == pytest.approx(97 / 3 * 1e-4 / 8e-9, rel=1e-4)


def test_a_link_without_gaps_is_saturated_by_any_block() -> None:
    (found,) = _lines([timing("ring", {size: [8e-9 * size] for size in (MIB, 4 * MIB)})]).values()
    assert found == pytest.approx((0, 8e-9), abs=1e-12)
    assert _block({"all_gather": found}) == 1


def test_the_fastest_is_that_of_the_median_turn() -> None:
    once, often = timing("ring", {MIB: [1.0, 9.0, 1.1]}), timing("broadcast", {MIB: [1.0, 2.0, 2.0]})
    one_by_one = [timing("broadcast", {MIB: [2.0]}), timing("ring", {MIB: [2.0]})]
    assert [t.algorithm for t in _fastest([often, once], one_by_one, MIB)] == ["ring"]


def test_what_sends_in_turns_is_not_the_fastest() -> None:
    """Its trains fill the link, with a message that goes the other way; one by one its messages take twice as long."""
    algorithms = [Collectives(reduce_scatter=name) for name in ("all_to_all", "direct")]
    trains = [Timing("reduce_scatter", c, {MIB: [seconds]}) for c, seconds in zip(algorithms, (0.98, 1.0), strict=True)]
    one_by_one = [Timing("reduce_scatter", c, {MIB: [seconds]}) for c, seconds in zip(algorithms, (1.97, 1.02), strict=True)]
    assert [t.algorithm for t in _fastest(trains, one_by_one, MIB)] == ["direct"]


def test_what_is_near_the_fastest_at_any_size_stays() -> None:
    fast, disturbed, slow = (
        timing(name, {1: [first], 2: [second]}) for name, first, second in [("ring", 1, 2), ("direct", 3, 2), ("native", 2, 4)]
    )
    assert [_is_near(t, [fast, disturbed, slow]) for t in (fast, disturbed, slow)] == [True, True, False]


@pytest.mark.parametrize(("gbyte", "sizes"), [(100, [4, 16, 64]), (0.1, [4, 16]), (0.01, [])])
def test_larger_messages_are_sent_where_that_is_not_too_long(gbyte: float, sizes: list[int]) -> None:
    trains = timing("native", {MIB // 4: [1.0], MIB: [MIB / (gbyte * 1e9)]})
    assert [size // MIB for size in _larger([trains], torch.device("cuda"))] == sizes
    assert [size // MIB for size in _larger([trains], torch.device("cpu"))] == sizes[:1]
