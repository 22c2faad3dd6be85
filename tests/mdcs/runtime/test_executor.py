"""The executor's contract on a CPU, how the runtime uses it, and training on a single rank without process groups.

The same contract and the same training run on CUDA in test_cuda.py.
"""

from __future__ import annotations

import pytest
import torch

import mdcs
from mdcs.runtime import api
from mdcs.runtime.executor import CpuExecutor, executor_for
from tests.mdcs.runtime.devices import (
    CONTRACT,
    HOWS,
    Watching,
    equal,
    make,
    parallel_run,
    plain_run,
)
from tests.mdcs.runtime.training import How

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause):
    clause(executor_for(CPU), CPU)


def test_a_device_that_is_not_supported():
    with pytest.raises(ValueError, match="device meta is not supported: cpu or cuda"):
        executor_for(torch.device("meta"))


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how.strategy}-{how.scheduler}")
def test_one_rank_trains_like_a_plain_loop(how: How):
    assert equal(parallel_run(CPU, how, 4), plain_run(CPU, 4))


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_the_runtime_keeps_to_the_contract(monkeypatch: pytest.MonkeyPatch, strategy: str):
    """What would be a race between two streams on a GPU is found here: points of compute are taken on the compute
    stream, and communication waits for one before it touches what compute has used.
    """
    watching = Watching(CpuExecutor())
    monkeypatch.setattr(api, "executor_for", lambda device: watching)
    assert equal(parallel_run(CPU, How(strategy, "random", seed=1), 4), plain_run(CPU, 4))
    assert watching.misuse == [] and watching.waited > 20 and watching.depth == 0


def test_autoplan_on_one_rank():
    model, optimizer = make(CPU)
    units = mdcs.partition(model, mdcs.ByLeaf())
    tokens = torch.arange(12).view(2, 6)
    plan = mdcs.autoplan(model, optimizer, units, lambda: model(tokens).square().mean(), strategy="fsdp")
    assert plan.world == 1 and set(map(str, plan.strategies)) <= {"fsdp", "sdp"}
