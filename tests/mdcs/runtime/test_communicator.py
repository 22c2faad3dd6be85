"""Both families between real ranks: the same result, whatever the number of ranks and the messages in flight."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.link import ALGORITHMS, Collectives, Kind
from mdcs.runtime.communicator import Communicator, PendingCollective
from tests.mdcs.runtime.ranks import Ranks

FAMILIES = ALGORITHMS["gloo"]
DTYPES = (torch.float64, torch.int64)


def numbers(elements: int, rank: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Whole ones: their sums are exact in any order."""
    return torch.randint(-1000, 1000, (elements,), generator=torch.Generator().manual_seed(seed * 100 + rank)).to(dtype)


def start(communicator: Communicator, kind: Kind, buffer: Tensor) -> tuple[PendingCollective, Tensor]:
    """A running collective, and where its result will be."""
    out = torch.empty(buffer.numel() // communicator.world, dtype=buffer.dtype)
    scratch = torch.empty_like(out)
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
