"""The host's time for a message, where the device executes behind the host: steps of a model that take the device no
time."""

from __future__ import annotations

import functools
import statistics
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mdcs.emulation import Emulation
from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ByClass, ModelUnit, partition
from mdcs.plan.job import Job
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers.wfbp import Partitioning
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile
from mdcs.runtime.engine import Engine, Trained
from mdcs.runtime.validation import RunOptions
from mdcs.sizes import MIB

_WIDTH, _BLOCKS = 256, (4, 64)
_STEPS = 7

NO_TIME = Link.uniform(1e6, 0.0, depth=1, emulated=True)
"""A link that takes no time."""


def tiny(device: torch.device) -> tuple[nn.Linear, torch.optim.Optimizer, list[ModelUnit]]:
    """Return a model whose blocks are sent in no time, its optimizer and its unit."""
    model = nn.utils.skip_init(nn.Linear, _WIDTH, _WIDTH, bias=False, device=device)  # draws no random number
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.0), partition(model, ByClass(("Linear",)))


@functools.lru_cache(maxsize=1)
def _alone(world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group of this rank; None without ranks. There is one, for torch cannot make such a group again."""
    return None if world is None else dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def forward(model: nn.Linear) -> Tensor:
    """Return the loss of a :func:`tiny` model."""
    loss: Tensor = model(model.weight.new_ones(1, _WIDTH)).sum()
    return loss


def seconds_per_message(profile: Profile, device: torch.device) -> float:
    """Return the host's seconds to enqueue one message: a line through steps with few and with many messages.

    ``profile``: of a :func:`tiny` model in an emulated world. A kernel stands for the collective.
    """
    world, found = dist.group.WORLD if dist.is_initialized() else None, []
    for blocks in _BLOCKS:
        model, optimizer, units = tiny(device)
        plan = make_plan(Job(profile), Uniform("zero2"), Partitioning(block_mib=_WIDTH * _WIDTH * 4 / MIB / blocks))
        options = RunOptions(emulate=Emulation(0, plan.world))
        engine = Engine(Trained(model, Optimizers(optimizer), units), plan, options, _alone(world))
        ends = [time.perf_counter()]
        try:
            for _ in range(_STEPS):
                forward(model).backward()
                engine.end_step()
                ends.append(time.perf_counter())
        finally:
            engine.end("it was a measurement")
        steps = [b - a for a, b in zip(ends[2:], ends[3:], strict=False)]
        found.append((len(plan.messages), statistics.median(steps)))
    (few, short), (many, long) = found
    return max(0.0, (long - short) / (many - few))
