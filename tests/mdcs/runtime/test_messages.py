"""One message at a time between real ranks: what arrives where, for every kind, fused or not, on each algorithm."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mdcs.plan.job import Job
from mdcs.plan.ledger import MessageBytes
from mdcs.plan.schedule import Message
from mdcs.plan.strategy import Strategy
from mdcs.plan.strategy_assignment import StrategyAssignment
from mdcs.planner.schedulers import RandomOrder
from mdcs.profile.link import ALGORITHMS, Collectives, Kind, Link
from mdcs.profile.schema import Profile, Slot, Unit
from mdcs.runtime.communicator import Communicator
from mdcs.runtime.context import RunContext
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.messages import Messages, Transfer
from mdcs.runtime.storage import UnitStorage
from mdcs.sizes import aligned
from tests.mdcs.runtime.ranks import Ranks

SIZES = (13, 6, 20)


def exchange(strategy: str, kind: str, fused: bool, algorithm: str, depth: int) -> dict[str, Any]:
    """Send every block of three units: gradients that are rank + 1 times 0, 1, 2 …, parameters that each rank has a
    part of; ``depth`` messages in flight.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    units = tuple(Unit(f"u{i}", (aligned(n),), True, (i, i), (2 - i, 2 - i)) for i, n in enumerate(SIZES))
    slots = tuple(Slot(i, "F", 1.0, 0, 0) for i in range(3)) + tuple(Slot(2 - i, "B", 1.0, 0, 0) for i in range(3))
    collectives = Collectives(algorithm)
    profile = Profile(units, slots, world, Link((0.0,) * 4, (0.0,) * 4), collectives=collectives)
    plan = RandomOrder(seed=5, max_blocks=3, fuse=0.0).schedule(StrategyAssignment(Job(profile), (Strategy(strategy),) * 3))
    context = RunContext(plan, ErrorContext(rank))
    storages = [
        UnitStorage(context, u, [("p", nn.Parameter(torch.arange(float(n)) + 100 * u))])
        for u, n in enumerate(SIZES)
    ]
    for storage in storages:
        storage.init_shards()
    no_updates: Any = None
    messages = Messages(
        context, storages, no_updates, no_updates, lambda collectives, _: Communicator(collectives, None)
    )
    parts = [(u, b) for u in range(3) for b in range(len(plan.blocks[u]))]
    wrong = []
    reduced = {}
    for storage in storages:
        storage.allocate()
        mine = [storage.flat_param[storage.owned_slice(b)].clone() for b in range(len(storage.blocks))]
        storage.flat_param.fill_(-1)
        if storage.shard is None:
            for b, part in enumerate(mine):
                storage.flat_param[storage.owned_slice(b)].copy_(part)
        storage.allocate_gradient()
        storage.full_gradient.copy_(torch.arange(float(storage.flat_param.numel())) * (rank + 1))
    in_flight: deque[Transfer] = deque()
    for group in [parts] if fused else [[p] for p in parts]:
        in_flight.append(Transfer(0, 0, 1, Message(Kind(kind), tuple(group), 0), MessageBytes((), (), (), 0, 0, 0)))
        messages.launch(in_flight[-1])
        if len(in_flight) == depth:
            reduced |= finish(messages, in_flight.popleft())
    while in_flight:
        reduced |= finish(messages, in_flight.popleft())
    factor = sum(r + 1 for r in range(world))
    for u, storage in enumerate(storages):
        summed = torch.arange(float(storage.flat_param.numel())) * factor
        whole = torch.zeros(storage.flat_param.numel())
        whole[: SIZES[u]] = torch.arange(float(SIZES[u])) + 100 * u
        for b in range(len(storage.blocks)):
            if kind == "AR":
                found, wanted = storage.full_gradient[storage.block_slice(b)], summed[storage.block_slice(b)]
            elif kind == "RS":
                found, wanted = reduced[u, b], summed[storage.owned_slice(b)]
            else:
                found, wanted = storage.flat_param[storage.block_slice(b)], whole[storage.block_slice(b)]
            if not torch.equal(found, wanted):
                wrong.append((u, b, found.tolist(), wanted.tolist()))
    return {"wrong": wrong, "blocks": len(parts)}


def finish(messages: Messages, transfer: Transfer) -> dict[tuple[int, int], torch.Tensor]:
    for work in transfer.works:
        work.wait()
    messages.land(transfer)
    return transfer.shards


@pytest.mark.parametrize(("fused", "depth"), [(False, 1), (False, 3), (True, 1)], ids=["alone", "in flight", "fused"])
@pytest.mark.parametrize(
    ("strategy", "kind", "algorithm"),
    [
        *(("dp", "AR", name) for name in ALGORITHMS["gloo"]),
        *(("zero2", "RS", name) for name in ALGORITHMS["gloo"]),
        *(("zero2", "AG_F", name) for name in ALGORITHMS["gloo"]),
        ("fsdp", "AG_F", "native"),
        ("fsdp", "AG_B", "ring"),
    ],
)
def test_a_message_arrives(two: Ranks, three: Ranks, strategy, kind, algorithm, fused, depth):
    """13, 6 and 20 numbers: padding for two ranks and for three."""
    for ranks in (two, three):
        for found in ranks.run(exchange, strategy, kind, fused, algorithm, depth):
            assert found["wrong"] == [] and found["blocks"] > 3
