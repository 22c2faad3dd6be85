"""The executor's contract on a CPU, how the runtime uses it, and training on a single rank without process groups.

The same contract and the same training run on CUDA in test_cuda.py.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mdcs
from mdcs.api import start
from mdcs.runtime import context
from mdcs.runtime.executor import CudaExecutor, executor_for
from tests.mdcs.runtime.devices import CONTRACT, HOWS, Limited, emulated_run, equal, make, parallel_run, plain_run
from tests.mdcs.runtime.training import How, optimizer_for, setup

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


@pytest.mark.parametrize("budget", [None, 1.2])
def test_a_budget_limits_the_allocator_for_as_long_as_it_lasts(monkeypatch: pytest.MonkeyPatch, budget: float | None):
    limited = Limited()
    monkeypatch.setattr(context, "executor_for", lambda device: limited)
    made, link = setup("tied"), mdcs.Link.uniform(10, 10, emulated=True)
    how = How("fsdp", "wfbp", budget=budget)
    run = emulated_run(made, optimizer_for("adam", made.model), how, mdcs.Emulation(0, 2), link)
    assert limited.limits == ([] if budget is None else [run.plan.budget, None])
    assert run.memory["retries"] == 7


class FakeEvent:
    """Notes who waits for it, and tells times as CUDA does: milliseconds in single precision."""

    now = 0.0

    def __init__(self, **options: bool) -> None:
        self.waited: list[str] = []

    def record(self, stream: Any) -> None:
        self.seconds = FakeEvent.now

    def synchronize(self) -> None:
        self.waited.append("host")

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: FakeEvent) -> float:
        return torch.tensor((later.seconds - self.seconds) * 1e3, dtype=torch.float32).item()


class FakeStream:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        event.waited.append("stream")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A torch.cuda for the executor, without a device: 8 GB, and an allocator that has tried again three times."""
    said, compute = SimpleNamespace(fractions=[], emptied=0, entered=[]), FakeStream()

    def empty() -> None:
        said.emptied += 1

    def limit(share: float, device: torch.device) -> None:
        if device.index is None:
            raise ValueError("Expected a torch.device with a specified index or an integer")  # as torch does
        said.fractions.append(share)

    for name, value in {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "set_stream": lambda stream: said.entered.append(stream),
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device: compute,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=8_000_000_000),
        "current_device": lambda: 1,
        "set_per_process_memory_fraction": limit,
        "get_per_process_memory_fraction": lambda device: said.fractions[-1] if said.fractions else 1.0,
        "empty_cache": empty,
        "memory_stats": lambda device: {"num_alloc_retries": 3},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return said


def test_on_cuda_streams_wait_for_each_other_and_the_host_does_not(fake_cuda: SimpleNamespace):
    executor = executor_for(torch.device("cuda", 0))
    assert isinstance(executor, CudaExecutor) and executor.runs_ahead
    here: Any = executor.record_event()
    with executor.on_comm_stream():
        executor.wait_event(here)
        there: Any = executor.record_event()
    executor.wait_event(there)
    assert (here.waited, there.waited) == (["stream"], ["stream"])


def test_on_cuda_streams_of_another_device_than_the_loop_s_are_entered_by_torch_which_puts_the_device_back(
    fake_cuda: SimpleNamespace,
):
    for index, entered in ((0, 0), (1, 2)):  # the loop's is 1
        with executor_for(torch.device("cuda", index)).on_comm_stream():
            pass
        assert len(fake_cuda.entered) == entered


def test_on_cuda_the_host_does_not_wait_for_ever(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    executor = executor_for(torch.device("cuda", 0))
    assert executor.wait(executor.record_event(), 1.0)
    monkeypatch.setattr(FakeEvent, "query", lambda self: False)
    assert not executor.wait(executor.record_event(), 0.01)


def test_on_cuda_times_are_as_fine_after_a_day_as_at_first(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    executor = executor_for(torch.device("cuda", 0))
    begin: Any
    for second in range(0, 86_400, 60):
        monkeypatch.setattr(FakeEvent, "now", float(second))
        begin = executor.record_timestamp()
        monkeypatch.setattr(FakeEvent, "now", second + 0.010)
        end = executor.record_timestamp()
        assert executor.seconds(end) - executor.seconds(begin) == pytest.approx(0.010, abs=1e-5)


BUDGET = round((2_000_000_000 - (44 << 20)) / 1.75)
"""Bytes with which the limit, whose rest is for fragments, is a quarter of the device."""


def test_on_cuda_the_budget_limits_the_share_of_the_device(fake_cuda: SimpleNamespace):
    executor = executor_for(torch.device("cuda", 0))
    executor.limit(BUDGET)
    executor.limit(9_000_000_000)
    executor.limit(None)
    assert fake_cuda.fractions == pytest.approx([0.25, 1.0, 1.0]) and fake_cuda.emptied == 2
    assert executor.retries() == 3


def test_on_cuda_a_limit_that_the_program_has_set_holds_and_comes_back(fake_cuda: SimpleNamespace):
    torch.cuda.set_per_process_memory_fraction(0.5, torch.device("cuda", 0))
    executor = executor_for(torch.device("cuda", 0))
    executor.limit(None)  # there is none to take back
    executor.limit(BUDGET)
    executor.limit(6_000_000_000)
    executor.limit(None)
    executor.limit(None)
    assert fake_cuda.fractions == pytest.approx([0.5, 0.25, 0.5, 0.5])


def test_cuda_without_a_number_is_the_current_device(fake_cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    """torch takes a share of "cuda" for an error, which came after all parameters had been sent."""
    executor = executor_for(torch.device("cuda"))
    executor.limit(1_000_000_000)
    assert isinstance(executor, CudaExecutor) and executor.device == torch.device("cuda", 1)
    monkeypatch.setattr(start, "Engine", lambda *arguments: arguments)
    monkeypatch.setattr(start, "Session", lambda made, *_, **__: made)
    linear = torch.nn.Linear(1, 1)
    _, _, options, _ = start.parallelize(linear, torch.optim.SGD(linear.parameters()), object(), [], device="cuda")  # type: ignore[arg-type, misc]
    assert options.device == torch.device("cuda", 1)


def test_autoplan_on_one_rank():
    model, optimizer = make(CPU)
    units = mdcs.partition(model, mdcs.ByLeaf())
    tokens = torch.arange(12).view(2, 6)
    plan = mdcs.autoplan(model, optimizer, units, lambda: model(tokens).square().mean(), strategy="fsdp")
    assert plan.world == 1 and set(map(str, plan.strategies)) <= {"fsdp", "sdp"}
