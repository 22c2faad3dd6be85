"""Both families between real ranks: the same result, whatever the number of ranks and the messages in flight."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.link import ALGORITHMS, KIND, Collectives, Kind
from mdcs.profiler import link_timing
from mdcs.profiler.link_timing import _shallowest, measure_link
from mdcs.runtime.communicator import Communicator, PendingCollective
from tests.mdcs.runtime.ranks import Ranks

FAMILIES = ALGORITHMS["gloo"]
DTYPES = (torch.float64, torch.int64)


def numbers(elements: int, rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Whole ones: their sums are exact in any order."""
    return torch.randint(-1000, 1000, (elements,), generator=torch.Generator().manual_seed(seed * 100 + rank)).to(dtype)


def start(communicator: Communicator, kind: Kind, buffer: Tensor) -> tuple[PendingCollective, Tensor]:
    """A running collective, and where its result will be."""
    elements, out = buffer.numel(), torch.empty(buffer.numel() // communicator.world, dtype=buffer.dtype)
    scratch = torch.empty(communicator.scratch(kind, elements), dtype=buffer.dtype)
    return communicator.launch(kind, buffer, scratch, out), out if kind is Kind.RS else buffer


def exchange(algorithm: str, seed: int) -> int:
    """Twelve messages of random kinds, sizes and types, up to three in flight; raises AssertionError for a wrong one."""
    communicator = Communicator(Collectives(algorithm), None)
    world, rank = communicator.world, dist.get_rank()
    rng = random.Random(seed)
    in_flight: list[tuple[PendingCollective, Tensor, Tensor]] = []

    def finish() -> None:
        running, found, wanted = in_flight.pop(0)
        running.wait()
        assert torch.equal(found, wanted), (found, wanted)

    for number in range(12):
        kind = rng.choice([Kind.AR, Kind.RS, Kind.AG_F, Kind.AG_B])
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


@pytest.mark.parametrize("algorithm", FAMILIES)
def test_the_result_is_right(two: Ranks, three: Ranks, four: Ranks, algorithm: str) -> None:
    for world, ranks in ((2, two), (3, three), (4, four)):
        for seed in (1, 2):
            assert ranks.run(exchange, algorithm, seed) == [world] * world


def same_bits(algorithm: str) -> list[float]:
    """Random numbers, whose sum depends on its order."""
    communicator = Communicator(Collectives(algorithm), None)
    buffer = torch.randn(4 * 3 * 50, generator=torch.Generator().manual_seed(dist.get_rank()))
    start(communicator, Kind.AR, buffer)[0].wait()
    return buffer.tolist()


@pytest.mark.parametrize("algorithm", FAMILIES)
def test_all_ranks_have_the_same_bits(three: Ranks, four: Ranks, algorithm: str) -> None:
    for ranks in (three, four):
        first, *others = ranks.run(same_bits, algorithm)
        assert all(other == first for other in others)


def test_on_two_ranks_both_families_have_the_bits_of_ddp(two: Ranks) -> None:
    """DDP's are those of the backend's all-reduce."""
    native, ring = (two.run(same_bits, algorithm) for algorithm in FAMILIES)
    assert native == ring


def interrupted(kind: Kind) -> str:
    """Rank 1 leaves before the message; the others hear of it."""
    communicator = Communicator(Collectives("ring"), None)
    dist.barrier()
    if dist.get_rank() == 1:
        return "gone"
    try:
        start(communicator, kind, torch.ones(12))[0].wait()
    except RuntimeError as e:
        return str(e)
    return "not noticed"


@pytest.mark.parametrize("kind", [Kind.AR, Kind.AG_F])
def test_a_rank_that_is_gone_is_an_error(kind: Kind) -> None:
    ranks = Ranks(2)
    try:
        said, gone = ranks.run(interrupted, kind)
    finally:
        ranks.stop()
    assert gone == "gone" and "not noticed" not in said


# ---- measured


def measured(algorithm: str | None) -> tuple[float, float, int, str]:
    link, collectives, spread = measure_link(torch.device("cpu"), depth=3, algorithm=algorithm)
    assert spread.keys() == {f"{name} of {operation}" for name in ("α", "gap", "1/β") for operation in KIND}
    assert all(0 <= low <= high for low, high in spread.values())
    assert len(link.alpha) == len(link.beta) == 4 and link.depth == 3 and not link.emulated
    assert link.alpha[2:] == (link.alpha[2],) * 2 and link.beta[2:] == (link.beta[2],) * 2 and len(link.gap) == 4
    return sum(link.alpha), sum(link.beta), link.block, collectives.algorithm


def test_all_ranks_measure_the_same_link_and_choose_the_same(two: Ranks, three: Ranks) -> None:
    for ranks in (two, three):  # on three, messages have several steps, and those of one train are at different ones
        first, *others = ranks.run(measured, None)
        assert all(other == first for other in others)
        assert first[1] > 0 and 1 << 20 <= first[2] <= 1 << 22 and first[3] in FAMILIES


def test_a_family_that_is_named_is_chosen(two: Ranks) -> None:
    assert {found[3] for found in two.run(measured, "native")} == {"native"}


def measured_depth() -> tuple[int, list[str]]:
    link, _, spread = measure_link(torch.device("cpu"), depth=None, algorithm="ring")
    return link.depth, [name for name in spread if name.endswith("in flight")]


def test_the_number_in_flight_is_measured_if_it_is_not_given(two: Ranks) -> None:
    (first, names), second = two.run(measured_depth)
    assert (first, names) == second and 1 <= first <= 4
    assert names == [f"{operation} with {n} in flight" for operation in KIND for n in (1, 2, 4)]


def trains(depth: int) -> list[dict[int, list[float]]]:
    """Seconds of both families, each kind alone and all in turns; two sizes in two turns."""
    kinds = tuple(KIND.values())
    senders = [(Collectives(name), own) for name in FAMILIES for own in (*((kind,) for kind in kinds), kinds)]
    return link_timing.LinkBenchmark(torch.device("cpu")).time_trains(senders, (1 << 12, 1 << 16), depth, 2)


def test_every_family_sends_trains_and_all_ranks_know_the_same_of_them(two: Ranks) -> None:
    for depth in (1, 3):
        first, second = two.run(trains, depth)
        assert first == second and len(first) == 4 * len(FAMILIES)
        for samples in first:
            assert [len(seconds) for seconds in samples.values()] == [2, 2]
            assert all(0 < s < 1 for seconds in samples.values() for s in seconds)


def test_as_few_in_flight_as_are_nearly_as_fast_as_any() -> None:
    assert _shallowest({1: [1.0, 9.0, 1.0], 2: [1.9, 2.0, 2.1], 3: [2.05], 4: [1.5]}) == 2
    assert _shallowest({1: [1.0], 2: [1.02], 3: [1.1], 4: [1.2]}) == 4


def test_a_world_of_one_has_a_link_that_takes_no_time() -> None:
    link, collectives, _ = measure_link(torch.device("cpu"), algorithm="native")
    assert (link.alpha, link.beta, collectives) == ((0.0,) * 4, (0.0,) * 4, Collectives("native"))
    with pytest.raises(ValueError, match="algorithm must be native or ring"):
        measure_link(torch.device("cpu"), algorithm="direct")


def warned_of() -> list[tuple[str, str]]:
    """Warnings of a loop that warns from one line and sends between, and those of sending."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # each once for a line of code
        communicator = Communicator(Collectives.default("nccl"), None)
        for _ in range(3):
            warnings.warn("this is deprecated", UserWarning, stacklevel=1)
            communicator.launch(Kind.AG_F, torch.zeros(4)).wait()
            communicator.launch(Kind.RS, torch.zeros(4), None, torch.zeros(2)).wait()
    return [(w.category.__name__, str(w.message)) for w in caught]


def test_sending_neither_warns_nor_lets_others_warn_again(two: Ranks) -> None:
    """torch's own names of NCCL's collectives, which gloo has, too: one is deprecated, and hiding that had its price."""
    assert two.run(warned_of) == [[("UserWarning", "this is deprecated")]] * 2


def measured_as_nccl(depth: int | None) -> tuple[int, set[int]]:
    """The depth of the link, and how many messages trains had in flight: gloo has what is asked of NCCL here, too."""
    found, train = set(), link_timing.LinkBenchmark._train

    def noted(ranks: Any, sender: Any, size: int, in_flight: int) -> float:
        found.add(in_flight)
        return train(ranks, sender, size, in_flight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link_timing, "backend_of", lambda group, device: "nccl")
        patch.setattr(link_timing.LinkBenchmark, "_train", noted)
        return measure_link(torch.device("cpu"), depth=depth).link.depth, found


@pytest.mark.parametrize("depth", [2, None])
def test_nccl_sends_one_message_at_a_time_and_is_measured_so(two: Ranks, depth: int | None) -> None:
    assert two.run(measured_as_nccl, depth) == [(1, {1})] * 2
