"""Wrappers of others around a model and its optimizer are taken off, and do nothing any more."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mdcs.model.optimizers import Optimizers, without_accelerate, without_ddp
from mdcs.model.units import UnsupportedModel
from tests.mdcs.optimizers import Lookahead, ScheduleFree
from tests.mdcs.runtime.ranks import Ranks


class Wrapped(torch.optim.Optimizer):
    """As AcceleratedOptimizer."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class Ema:
    """Wraps an optimizer, and is none."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups = base, base.param_groups


def test_an_optimizer_is_found_in_what_wraps_it() -> None:
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters())
    assert without_accelerate(Wrapped(Wrapped(plain))) is without_accelerate(plain) is plain


@pytest.mark.parametrize("wrapper", [Lookahead, Ema])
def test_a_wrapper_with_work_of_its_own_is_refused(wrapper: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{wrapper.__name__}: wraps SGD: .*writeback=True"):
        Optimizers(wrapper(torch.optim.SGD(nn.Linear(2, 2).parameters())))
    with pytest.raises(UnsupportedModel, match="ScheduleFree: its train.. and eval.. change the parameters"):
        Optimizers(ScheduleFree(nn.Linear(2, 2).parameters()))
    with pytest.raises(UnsupportedModel, match="Linear is no torch.optim.Optimizer"):
        Optimizers(nn.Linear(2, 2))  # type: ignore[arg-type]


def unwrap() -> tuple[bool, bool, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model)
    reducer = weakref.ref(ddp.reducer)
    assert without_ddp(ddp) is model
    gc.collect()
    x = torch.rand(4, 2) * (1 + dist.get_rank())
    with ddp.no_sync():
        same = torch.equal(ddp(x), copy.deepcopy(model)(x))
    ddp(x).square().sum().backward()
    return reducer() is None, same, [float(p.grad.sum()) for p in model.parameters()]


def test_ddp_only_calls_the_model_afterwards(two: Ranks) -> None:
    (first_gone, first_same, first), (second_gone, second_same, second) = two.run(unwrap)
    assert first_gone and second_gone and first_same and second_same
    assert first != second  # its own gradients stay on each rank


def inside() -> str:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ValueError) as refusal:
        without_ddp(nn.Sequential(ddp))
    return str(refusal.value)


def test_ddp_inside_of_the_model_is_refused(two: Ranks) -> None:
    assert all("model.0 is in DistributedDataParallel" in said for said in two.run(inside))
