"""Every algorithm between real ranks: the same result, whatever the number of ranks and the messages in flight."""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.calibrate import link_timing
from mdcs.calibrate.link_timing import _shallowest, measure_link, measure_trains
from mdcs.profile.algorithms import ALGORITHMS, KIND, Collectives
from mdcs.profile.link import Kind
from mdcs.runtime.communicator import Communicator, Running
from tests.mdcs.runtime.ranks import Ranks

PAIRS = [(operation, name) for operation, names in ALGORITHMS["gloo"].items() for name in names]
DTYPES = (torch.float64, torch.int64)


def numbers(elements: int, rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Whole ones: their sums are exact in any order."""
    return torch.randint(-1000, 1000, (elements,), generator=torch.Generator().manual_seed(seed * 100 + rank)).to(dtype)


def start(communicator: Communicator, kind: Kind, buffer: Tensor) -> tuple[Running, Tensor | None, Tensor]:
    """A running collective, the buffer that it receives in, and where its result will be."""
    elements, world = buffer.numel(), communicator.world
    received = torch.empty(communicator.collectives.buffer(kind, elements, world), dtype=buffer.dtype)
    if kind is Kind.AR:
        return communicator.all_reduce(buffer, received), None, buffer
    if kind is Kind.RS:
        out = torch.empty(elements // world, dtype=buffer.dtype)
        return communicator.reduce_scatter(buffer, received, out), received, out
    return communicator.all_gather(buffer), None, buffer


def exchange(operation: str, algorithm: str, seed: int) -> int:
    """Six messages of random sizes and types, up to three in flight; raises AssertionError for a wrong one."""
    communicator = Communicator(replace(Collectives(), **{operation: algorithm}), None)
    world, rank, kind = communicator.world, communicator.rank, KIND[operation]
    rng = random.Random(seed)
    in_flight: list[tuple[Running, Tensor | None, Tensor, Tensor]] = []

    def finish() -> None:
        running, received, found, wanted = in_flight.pop(0)
        running.wait()
        if algorithm == "all_to_all":
            assert received is not None
            found = received.view(world, -1).sum(0)
        assert torch.equal(found, wanted), (found, wanted)

    for number in range(6):
        part = rng.choice([1, 2, 3, 7, 64, 1001, 40_000])
        dtype = rng.choice(DTYPES)
        inputs = [numbers(part * world, r, seed + number, dtype) for r in range(world)]
        total = torch.stack(inputs).sum(0)
        gathered = torch.cat([x.chunk(world)[r] for r, x in enumerate(inputs)])
        wanted = {Kind.AR: total, Kind.RS: total.chunk(world)[rank]}.get(kind, gathered)
        in_flight.append((*start(communicator, kind, inputs[rank].clone()), wanted))
        if len(in_flight) == 3:
            finish()
    while in_flight:
        finish()
    return world


@pytest.mark.parametrize(("operation", "algorithm"), PAIRS)
def test_the_result_is_right(two: Ranks, three: Ranks, four: Ranks, operation: str, algorithm: str) -> None:
    for world, ranks in ((2, two), (3, three), (4, four)):
        for seed in (1, 2):
            assert ranks.run(exchange, operation, algorithm, seed) == [world] * world


def same_bits(algorithm: str) -> list[float]:
    """Random numbers, whose sum depends on its order."""
    communicator = Communicator(Collectives(all_reduce=algorithm), None)
    buffer = torch.randn(4 * 3 * 50, generator=torch.Generator().manual_seed(communicator.rank))
    start(communicator, Kind.AR, buffer)[0].wait()
    return buffer.tolist()


@pytest.mark.parametrize("algorithm", ALGORITHMS["gloo"]["all_reduce"])
def test_all_ranks_have_the_same_bits(three: Ranks, four: Ranks, algorithm: str) -> None:
    for ranks in (three, four):
        first, *others = ranks.run(same_bits, algorithm)
        assert all(other == first for other in others)


def interrupted(operation: str, algorithm: str) -> str:
    """Rank 1 leaves before the message; the others hear of it."""
    communicator = Communicator(replace(Collectives(), **{operation: algorithm}), None)
    dist.barrier()
    if communicator.rank == 1:
        return "gone"
    try:
        start(communicator, KIND[operation], torch.ones(12))[0].wait()
    except RuntimeError as e:
        return str(e)
    return "not noticed"


@pytest.mark.parametrize(
    ("operation", "algorithm"),
    [("all_reduce", "ring"), ("all_reduce", "reduce_broadcast"), ("all_gather", "ring"), ("reduce_scatter", "direct")],
)
def test_a_rank_that_is_gone_is_an_error(operation: str, algorithm: str) -> None:
    ranks = Ranks(2)
    try:
        said, gone = ranks.run(interrupted, operation, algorithm)
    finally:
        ranks.stop()
    assert gone == "gone" and "not noticed" not in said


# ---- measured


def measured(wanted: dict[str, str]) -> tuple[float, float, int, Collectives]:
    link, collectives, spread = measure_link(torch.device("cpu"), depth=3, wanted=wanted)
    operations = ("all_reduce", "reduce_scatter", "all_gather")
    assert spread.keys() == {f"{name} of {operation}" for name in ("α", "gap", "1/β") for operation in operations}
    assert all(0 <= low <= high for low, high in spread.values())
    assert len(link.alpha) == len(link.beta) == 4 and link.depth == 3 and not link.emulated
    assert link.alpha[2:] == (link.alpha[2],) * 2 and link.beta[2:] == (link.beta[2],) * 2 and len(link.gap) == 4
    return sum(link.alpha), sum(link.beta), link.block, collectives


def test_all_ranks_measure_the_same_link_and_choose_the_same(two: Ranks, three: Ranks) -> None:
    for ranks in (two, three):  # on three, messages have several steps, and those of one train are at different ones
        first, *others = ranks.run(measured, {})
        assert all(other == first for other in others)
        assert first[1] > 0 and 1 << 18 <= first[2] <= 1 << 22


def measured_depth() -> tuple[int, list[str]]:
    link, _, spread = measure_link(torch.device("cpu"), depth=None, wanted=dict.fromkeys(KIND, "ring"))
    return link.depth, [name for name in spread if name.endswith("in flight")]


def test_the_number_in_flight_is_measured_if_it_is_not_given(two: Ranks) -> None:
    (first, names), second = two.run(measured_depth)
    assert (first, names) == second and 1 <= first <= 4
    assert names == [f"{operation} with {n} in flight" for operation in KIND for n in (1, 2, 4)]


def trains(depth: int) -> list[tuple[str, str, dict[int, list[float]]]]:
    """Of every algorithm, two sizes in two turns."""
    found = measure_trains(torch.device("cpu"), ALGORITHMS["gloo"], (1 << 12, 1 << 16), depth=depth, turns=2)
    return [(t.operation, t.algorithm, t.samples) for t in found]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_algorithm_sends_trains_and_all_ranks_know_the_same_of_them(two: Ranks, depth: int) -> None:
    first, second = two.run(trains, depth)
    assert first == second and [pair[:2] for pair in first] == PAIRS
    for *_, samples in first:
        assert [len(seconds) for seconds in samples.values()] == [2, 2]
        assert all(0 < s < 1 for seconds in samples.values() for s in seconds)


def test_as_few_in_flight_as_are_nearly_as_fast_as_any() -> None:
    assert _shallowest({1: [1.0, 9.0, 1.0], 2: [1.9, 2.0, 2.1], 3: [2.05], 4: [1.5]}) == 2
    assert _shallowest({1: [1.0], 2: [1.02], 3: [1.1], 4: [1.2]}) == 4


def test_what_is_named_is_chosen(two: Ranks) -> None:
    wanted = {"all_reduce": "reduce_broadcast", "reduce_scatter": "native", "all_gather": "ring"}
    for *_, collectives in two.run(measured, wanted):
        assert collectives == Collectives(**wanted)
    for *_, collectives in two.run(measured, {"reduce_scatter": "ring"}):
        assert collectives.reduce_scatter == "ring"


def test_a_world_of_one_has_a_link_that_takes_no_time() -> None:
    link, collectives, _ = measure_link(torch.device("cpu"), wanted={"all_gather": "ring"})
    assert (link.alpha, link.beta, collectives) == ((0.0,) * 4, (0.0,) * 4, Collectives(all_gather="ring"))
    with pytest.raises(ValueError, match="all_reduce must be"):
        measure_link(torch.device("cpu"), wanted={"all_reduce": "rng"})


def warned_of() -> list[tuple[str, str]]:
    """What a loop that warns from one line, and sends between, says; and what sending says."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # each once for a line of code
        communicator = Communicator(Collectives.default("nccl"), None)
        for _ in range(3):
            warnings.warn("this is deprecated", UserWarning, stacklevel=1)
            communicator.all_gather(torch.zeros(4)).wait()
            communicator.reduce_scatter(torch.zeros(4), None, torch.zeros(2)).wait()
    return [(w.category.__name__, str(w.message)) for w in caught]


def test_sending_neither_warns_nor_lets_others_warn_again(two: Ranks) -> None:
    """torch's own names of NCCL's collectives, which gloo has, too: one is deprecated, and hiding that had its price."""
    assert two.run(warned_of) == [[("UserWarning", "this is deprecated")]] * 2


def measured_as_nccl(depth: int | None) -> tuple[int, set[int]]:
    """The depth of the link, and how many messages trains had in flight: gloo has what is asked of NCCL here, too."""
    found, train = set(), link_timing._Ranks._train

    def noted(ranks: Any, timings: Any, size: int, in_flight: int) -> float:
        found.add(in_flight)
        return train(ranks, timings, size, in_flight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_timing, "backend_of", lambda group, device: "nccl")
        patch.setattr(link_timing._Ranks, "_train", noted)
        return measure_link(torch.device("cpu"), depth=depth).link.depth, found


@pytest.mark.parametrize("depth", [2, None])
def test_nccl_sends_one_message_at_a_time_and_is_measured_so(two: Ranks, depth: int | None) -> None:
    assert two.run(measured_as_nccl, depth) == [(1, {1})] * 2
