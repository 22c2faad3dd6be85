"""The same contract, training and emulated worlds on a GPU; run with ``-m gpu`` on a machine that has one."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mdcs
from mdcs.profile.link import Collectives
from mdcs.runtime.executor import CudaExecutor, executor_for, run_on_comm_stream
from tests.mdcs.runtime.devices import CONTRACT, HOWS, emulated_run, equal, parallel_run, plain_run
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, optimizer_for, setup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = 4


def cuda() -> torch.device:
    return torch.device("cuda", 0)


@pytest.mark.parametrize("clause", CONTRACT, ids=lambda clause: clause.__name__)
def test_contract(clause):
    executor = executor_for(cuda())
    assert isinstance(executor, CudaExecutor)
    clause(executor, cuda())


def test_a_mark_holds_communication_back():
    executor = CudaExecutor(cuda())
    flag = torch.zeros(1, device=cuda())
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s on the compute stream
    flag += 1
    mark = executor.record_event()
    with executor.on_comm_stream():
        early = flag.clone()
        executor.wait_event(mark)
        late = flag.clone()
        there = executor.record_event()
    executor.wait_event(there)
    assert (early.item(), late.item()) == (0, 1)


def test_the_host_does_not_wait_for_what_it_has_enqueued():
    executor = CudaExecutor(cuda())
    begin = time.perf_counter()
    with run_on_comm_stream(executor):
        torch.cuda._sleep(1_000_000_000)  # about 0.5 s
    assert time.perf_counter() - begin < 0.2
    assert executor.wait(executor.record_event(), 10.0)
    assert time.perf_counter() - begin > 0.2


def test_compute_does_not_wait_for_messages_behind():
    executor = CudaExecutor(cuda())
    with executor.on_comm_stream():
        torch.cuda._sleep(1_000_000_000)
        communicated = executor.record_event()
    torch.ones(8, device=cuda()).sum()
    torch.cuda.current_stream(cuda()).synchronize()
    assert not executor.query(communicated)
    assert executor.wait(communicated, 10.0)


@pytest.fixture(scope="module")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", HOWS, ids=lambda how: f"{how.strategy}-{how.scheduler}")
def test_one_rank_over_nccl_trains_like_a_plain_loop(nccl: None, how: How):
    losses, state = parallel_run(cuda(), how, STEPS)
    wanted, weights = plain_run(cuda(), STEPS)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


def train_on_one_gpu(how: How) -> bool:
    """Both ranks have the same batches, so their average is what one alone would do."""
    ours, alone = parallel_run(cuda(), how, STEPS), plain_run(cuda(), STEPS)
    close = all(torch.allclose(ours[1][n], alone[1][n], rtol=1e-4, atol=1e-6) for n in alone[1])
    return close or equal(ours, alone)


@pytest.mark.parametrize("strategy", ["dp", "zero2", "sdp", "fsdp"])
@pytest.mark.parametrize("scheduler", ["sequential", "wfbp", "fusion"])
def test_two_ranks_on_one_gpu_over_gloo(two: Ranks, strategy: str, scheduler: str):
    """gloo reduces and broadcasts CUDA tensors, and does nothing else with them."""
    how = How(strategy, scheduler, collectives=Collectives("native"))
    assert two.run(train_on_one_gpu, how, timeout_s=120) == [True, True]


# ---- emulated worlds, budgets


@pytest.mark.parametrize("world", [8, 64])
@pytest.mark.parametrize(("strategy", "scheduler"), [("dp", "wfbp"), ("zero2", "dear"), ("fsdp", "priority"), ("sdp", "fusion")])
def test_an_emulated_world(strategy: str, scheduler: str, world: int):
    """Messages in the order of the plan, no faster than the link; shards of the size that they have on so many ranks."""
    made = setup("line-96-128-128-64")
    made.model.to(cuda())
    link = mdcs.Link.uniform(0.5, 100.0, depth=1, emulated=True)
    how = How(strategy, scheduler, collectives=Collectives.default("nccl"), bytes=40_000)
    found = emulated_run(made, optimizer_for("adam", made.model), how, mdcs.Emulation(world // 3, world), link, steps=8)
    plan = found.plan
    assert found.sent == sorted(found.sent)
    assert [i for round_, i in found.sent if 1 <= round_ < 7] == [*range(len(plan.messages))] * 6
    assert found.shards == sum(plan.profile.layouts[u].elements for u, s in enumerate(plan.strategies) if s.sharded) // world
    least = sum(link.beta_of(m.kind) * plan.wire(m) for m in plan.messages)
    steps = sorted(r.times.step_s for r in found.records)
    assert steps[len(steps) // 2] >= 0.98 * least
    sent = sorted(r.times.communication_s for r in found.records)  # a step's messages may run in the next one's time
    assert sent[len(sent) // 2] >= 0.9 * least
    assert found.memory["measured"]["total"] > 0 and found.memory["retries"] is not None


def test_the_budget_is_the_allocator_s():
    """While a plan with a budget runs, torch gives no more than the budget; afterwards it does."""
    executor = executor_for(cuda())
    executor.limit(64 << 20)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 << 20, dtype=torch.uint8, device=cuda())
    finally:
        executor.limit(None)
    assert torch.empty(128 << 20, dtype=torch.uint8, device=cuda()).numel() == 128 << 20
