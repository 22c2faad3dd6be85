"""What trains come to, from times made by hand; sent between real ranks in tests/mdcs/runtime/test_communicator.py, too."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mdcs.calibrate.link_timing import (
    Timing,
    _block,
    _fastest,
    _fastest_team,
    _is_near,
    _larger,
    _lines,
    _Message,
    _Ranks,
    _teams,
)
from mdcs.profile.algorithms import Collectives
from mdcs.sizes import MIB

from ..runtime.conftest import three  # noqa: F401  # the ranks that the runtime's tests share
from ..runtime.ranks import Ranks


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


def of_all(*names: str) -> list[Timing]:
    """All-reduce, reduce-scatter and all-gather by these algorithms."""
    operations = "all_reduce", "reduce_scatter", "all_gather"
    return [Timing(o, Collectives(**{o: name})) for o, name in zip(operations, names, strict=True)]


def test_teams_are_the_fastest_and_those_of_one_algorithm() -> None:
    near = [*of_all("native", "ring", "ring"), *of_all("ring", "direct", "direct"), *of_all("direct", "all_to_all", "broadcast")]
    teams = _teams(near, of_all("native", "ring", "ring"))
    assert [[t.algorithm for t in team] for team in teams] == [
        ["native", "ring", "ring"],
        ["ring", "ring", "ring"],
        ["direct", "direct", "direct"],
    ]
    fixed = of_all("reduce_broadcast", "native", "ring")
    assert _teams(fixed, fixed) == [fixed]


def test_where_an_algorithm_is_not_near_the_fastest_stands_in() -> None:
    near = [*of_all("native", "ring", "ring"), *of_all("direct", "direct", "direct")[::2]]
    assert _teams(near, of_all("native", "ring", "ring"))[1:] == [of_all("direct", "ring", "direct")]


def test_the_fastest_team_is_judged_beside_each_other_and_apart() -> None:
    mixed, ring = of_all("native", "ring", "ring"), of_all("ring", "ring", "ring")
    apart = {(t.operation, t.algorithm): 1.0 for t in [*mixed, *ring]} | {("all_reduce", "native"): 0.7}
    assert _fastest_team([mixed, ring], [1.2, 1.0], apart) == ring
    assert _fastest_team([mixed, ring], [1.0, 1.0], apart) == mixed


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


# ---- sent between three ranks, where rings have several steps


def gathered_in_turns(orders: list[list[str]]) -> list[list[float]]:
    """Two all-gathers of one train, of different sizes; every rank starts and waits for them in an order of its own."""
    ranks = _Ranks(torch.device("cpu"), None)
    messages = {name: _Message(timing("ring", {}), size, ranks) for name, size in (("a", 96), ("b", 24))}
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


def test_messages_of_a_train_do_not_meet_whatever_step_each_rank_is_at(three: Ranks) -> None:  # noqa: F811
    one_by_one, together = ["start a", "wait a", "start b", "wait b"], ["start a", "start b", "wait a", "wait b"]
    assert three.run(gathered_in_turns, [one_by_one, together, together]) == [[0, 1, 2, 0, 1, 2]] * 3
