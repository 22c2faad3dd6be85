"""The norm that clips is the same to the last bit however gradients are cut, so any two plans train alike."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mdcs.runtime import gradient_scaling as norm
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, compare, parallel_for, reference, train

CPU = torch.device("cpu")


def norm_of(ranks: list[list[Tensor]], dtype: torch.dtype) -> float:
    """The norm of all ranks' gradients."""
    works = [norm.workspace(gradients, CPU) for gradients in ranks]
    total = torch.stack([norm.sum_squares(gradients, work) for gradients, work in zip(ranks, works, strict=True)]).sum(0)
    least, found, largest = norm.with_bounds(total, dtype)
    if least < largest:
        return exact_norm_of(ranks, dtype)
    return float(found)


def exact_norm_of(ranks: list[list[Tensor]], dtype: torch.dtype) -> float:
    """The norm by exact sums, rounded."""
    counts = torch.stack([norm.count_squares(gradients, norm.workspace(gradients, CPU)) for gradients in ranks]).sum(0)
    return float(torch.tensor(norm.exact_norm(counts), dtype=torch.float64).to(dtype))


def dealt(gradient: Tensor, world: int, rng: random.Random) -> list[list[Tensor]]:
    """To each rank some pieces, cut anywhere, in any order."""
    cuts = sorted(rng.sample(range(1, gradient.numel()), rng.randint(0, min(40, gradient.numel() - 1))))
    pieces = list(gradient.tensor_split(cuts))
    rng.shuffle(pieces)
    return [pieces[rank::world] for rank in range(world)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("spread", [0.5, 8.0, 30.0])
def test_no_cut_changes_a_bit(dtype: torch.dtype, spread: float):
    """``spread`` is that of the elements' sizes: e^±8 within one gradient, say."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2, 5_003, dtype=torch.float64, generator=generator)
    gradient = (normal[0] * (spread * normal[1]).clamp(-80, 80).exp()).to(dtype)
    result = torch.float64 if dtype == torch.float64 else torch.float32
    rng, whole = random.Random(0), norm_of([[gradient]], result)
    assert {norm_of(dealt(gradient, world, rng), result) for world in (1, 2, 3) for _ in range(6)} == {whole}
    exact = math.sqrt(math.fsum(x * x for x in gradient.tolist()))
    assert whole == float(torch.tensor(exact).to(result)) or result == torch.float64 and whole == pytest.approx(exact, rel=1e-15)


def test_a_norm_near_the_boundary_between_two_results_is_summed_exactly():
    generator, rng, found = torch.Generator().manual_seed(0), random.Random(0), 0
    for _ in range(5_000):
        gradient = torch.randn(8, generator=generator)
        least, _, largest = norm.with_bounds(norm.sum_squares([gradient], norm.workspace([gradient], CPU)), torch.float32)
        assert least <= exact_norm_of([[gradient]], torch.float32) <= largest
        if least < largest:
            found += 1
            pieces = [exact_norm_of(dealt(gradient, world, rng), torch.float32) for world in (1, 2, 3)]
            assert pieces == [exact_norm_of([[gradient]], torch.float32)] * 3
    assert found > 0


@pytest.mark.parametrize(
    ("elements", "wanted"),
    [
        ([0.0, 0.0], 0.0),
        ([3e-40, 4e-40], 5e-40),
        ([3e38, 3e38], math.inf),  # more than float32 has: infinite, as torch's
        ([1.0, math.inf, -2.0], math.inf),
        ([-math.inf, 1.0], math.inf),
        ([math.inf, math.nan], math.nan),
        ([1.0, math.nan], math.nan),
    ],
)
def test_numbers_at_the_ends_of_float32_and_beyond(elements: list[float], wanted: float):
    """Whichever rank has them; another has zeros, or nothing to count."""
    for ranks in itertools.permutations([[torch.tensor(elements)], [torch.zeros(3)], []]):
        assert norm_of(list(ranks), torch.float32) == pytest.approx(wanted, rel=1e-5, nan_ok=True)


# ---- in training

PLANS = [
    How("dp", "wfbp"), How("zero2", "sequential"), How("sdp", "fusion"), How("fsdp", "partitioning"),
    *(How("random", "random", seed=seed, bytes=1000 * (1 + seed)) for seed in range(8)),
]  # fmt: skip


def clipped(job: Job, plans: list[How]) -> dict[str, Any]:
    """By plan the losses and the last norm; and DDP's losses."""
    found = []
    for how in plans:
        with parallel_for(job, how) as (made, parallel, optimizer):
            losses = train(job, made, parallel, optimizer)
            parallel.drain()
            found.append((losses, parallel.grad_norm))
    return {"plans": found, "ddp": list(reference(job).losses)}


@pytest.mark.parametrize(("micro_steps", "plans"), [(1, PLANS), (2, PLANS[-2:])], ids=["12 plans", "accumulated"])
def test_clipped_losses_and_norms_are_those_of_any_plan(two: Ranks, micro_steps: int, plans: list[How]):
    job = Job("gpt2", micro_steps, clip_norm=0.1, steps=10, exact_norm=True)
    ranks = two.run(clipped, job, plans, timeout_s=120)
    assert len({rank_norm for rank in ranks for _, rank_norm in rank["plans"]}) == 1
    for rank in ranks:
        assert [losses == rank["ddp"] for losses, _ in rank["plans"]] == [True] * len(plans)


@pytest.mark.parametrize(("limit", "exact"), [(0.1, True), (1e6, False)], ids=["its norm rounded once", "below the limit"])
def test_clipping_equals_ddp_bit_for_bit(two: Ranks, limit: float, exact: bool):
    """But for how torch rounds the norm in float32, which makes no difference where nothing is clipped."""
    for result in two.run(compare, Job("tied", clip_norm=limit, exact_norm=exact), How("random", "random", seed=3)):
        assert result["bitwise"], result
