"""One unit's buffers, with shapes small enough to write down."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mdcs.model.units import UnsupportedModel
from mdcs.plan.job import Job
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.schedulers import RandomOrder, StrategyAssignment, Wfbp
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.storage import UnitStorage

FREE = Link((0.0,) * 4, (0.0,) * 4)


def plan_of(numel: int, strategy: str, world: int = 2, blocks: int = 1) -> Plan:
    unit = Unit("u", (numel,), True, (0, 0), (0, 0))
    profile = Profile((unit,), (Slot(0, "F", 1.0, 0, 0), Slot(0, "B", 1.0, 0, 0)), world, FREE)
    mix = StrategyAssignment(Job(profile), (Strategy(strategy),))
    if blocks == 1:
        return Wfbp().schedule(mix)
    for seed in range(1000):
        plan = RandomOrder(seed, max_blocks=blocks, fuse=0.0).schedule(mix)
        if len(plan.blocks[0]) == blocks:
            return plan
    raise AssertionError(f"no plan with {blocks} blocks")


def storage_of(rank: int, strategy: str = "sdp", blocks: int = 1) -> tuple[UnitStorage, list[nn.Parameter]]:
    """Two parameters of 2 x 4 and 7 numbers, 0 … 14, and one number of padding."""
    parameters = [nn.Parameter(torch.arange(8.0).view(2, 4)), nn.Parameter(torch.arange(8.0, 15.0))]
    named = [("a", parameters[0]), ("b", parameters[1])]
    storage = UnitStorage(RunContext(plan_of(16, strategy, blocks=blocks), ErrorContext(rank)), 0, named)
    storage.init_shards()
    return storage, parameters


def test_a_rank_owns_a_part_of_every_block():
    """So that a gather of one block is one contiguous piece of the buffer."""
    storage, _ = storage_of(1, blocks=3)
    assert sum(storage.blocks) == 16 and len(storage.blocks) == 3
    owned = []
    for b, size in enumerate(storage.blocks):
        own = storage.owned[b]
        assert own.stop - own.start == size // 2
        assert own.stop == storage.offsets[b] + size  # the second half
        owned += list(range(own.start, own.stop))
    assert storage.shard is not None
    assert storage.shard.tolist() == [i if i < 15 else 0 for i in owned]
    assert [each for b in range(3) for each in storage.owned_shard(b).tolist()] == storage.shard.tolist()


def test_views_that_autograd_saved_are_valid_after_a_gather():
    storage, (a, _) = storage_of(0)
    storage.allocate()
    storage.flat_param.copy_(torch.arange(16.0))
    x = torch.ones(4, requires_grad=True)
    loss = (a @ x).sum()
    storage.free()
    storage.allocate()
    storage.flat_param.copy_(torch.arange(16.0))
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [4, 6, 8, 10]  # columns of [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_memory_that_another_library_may_use_is_not_freed():
    storage, (a, _) = storage_of(0)
    storage.allocate()
    array = a.detach().numpy()
    with pytest.raises(UnsupportedModel, match=r"^u: .*numpy"):
        storage.free()
    assert array.shape == (2, 4) and storage.is_full


def odd(strategy: str) -> tuple[UnitStorage, list[nn.Parameter]]:
    """Parameters of odd sizes, the second in channels_last, the third with gaps between its elements."""
    torch.manual_seed(0)
    parameters = [
        nn.Parameter(torch.randn(5)),
        nn.Parameter(torch.randn(3, 5, 1, 3).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(3, 14)[:, ::2]),
    ]
    named = [(str(i), p) for i, p in enumerate(parameters)]
    return UnitStorage(RunContext(plan_of(8 + 48 + 24, strategy), ErrorContext(0)), 0, named), parameters


def test_parameters_begin_at_16_bytes_and_keep_their_strides():
    storage, parameters = odd("dp")
    storage.allocate_gradient()
    for p, place in zip(parameters, storage.places, strict=True):
        for flat in (storage.flat_param, storage.full_gradient):
            assert place.view(flat).data_ptr() % 16 == 0
        assert torch.equal(place.view(storage.flat_param), p)
    assert parameters[1].stride() == (15, 1, 15, 5)
    assert parameters[1].is_contiguous(memory_format=torch.channels_last)
    assert parameters[2].is_contiguous()
    assert all(place.view(storage.flat_param).stride() == p.stride() for p, place in zip(parameters, storage.places, strict=True))


# ---- who has the memory: the plan, or a use that the plan does not have


def booked() -> tuple[UnitStorage, RunContext]:
    context = RunContext(plan_of(16, "sdp"), ErrorContext(0))
    storage = UnitStorage(context, 0, [("a", nn.Parameter(torch.zeros(16)))])
    storage.init_shards()
    return storage, context


def test_a_unit_outside_of_the_plan_is_the_plan_s_again_once_it_is_gathered() -> None:
    storage, context = booked()
    storage.take_outside()
    assert context.account.live["full_parameters"] == context.account.outside == storage.full_bytes
    storage.begin_gather()
    assert context.account.live["full_parameters"] == storage.full_bytes and context.account.outside == 0
    storage.free_outside()
    assert storage.is_full  # it is no more outside of the plan


def test_what_has_no_memory_is_not_freed_again() -> None:
    storage, context = booked()
    storage.allocate(), storage.allocate(), storage.free(), storage.free()
    storage.allocate_gradient(), storage.allocate_gradient()
    assert context.account.live["full_parameters"] == 0
    assert context.account.live["gradients"] == storage.layout.grad_bytes
    storage.free_gradient(), storage.free_gradient()
    assert context.account.live["gradients"] == 0


def test_a_restart_leaves_what_is_at_rest() -> None:
    storage, context = booked()
    storage.take_outside(), storage.allocate_gradient(), storage.reset_iteration()
    assert not storage.is_full and not storage.is_outside and context.account.outside == 0
    assert context.account.live == {**context.account.live, **context.ledger.at_rest, "full_parameters": 0, "gradients": 0}
