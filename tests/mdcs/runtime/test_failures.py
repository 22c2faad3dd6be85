"""Everything that can go wrong is one clear error on every rank, in time; nothing hangs and nothing is left behind.

A function that runs on the ranks fails there; the test reads what each rank raised.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mdcs
from mdcs.emulation import Pacer
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.link import Collectives
from mdcs.runtime import thread_transport
from mdcs.runtime.errors import ErrorContext, FailureChannel
from tests.mdcs.runtime import devices
from tests.mdcs.runtime.ranks import ROOT, Outcome, Ranks
from tests.mdcs.runtime.test_loops import one_step as step
from tests.mdcs.runtime.training import How, Job, Setup, optimizer_for, parallel_for, plan_for, profile_of, setup, train

NATIVE, RING = Collectives("native"), Collectives("ring")
TIMEOUT_S = 3.0
HANG_S = 40.0  # less than the 60 s of a process group: no error comes from there


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks of their own: some of them will not survive."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def errors(ranks: Ranks, function: Callable[..., Any], *arguments: Any) -> list[Outcome]:
    """Errors that the ranks raised, none of them after waiting for another's process group to time out."""
    outcomes = ranks.outcomes(function, *arguments, timeout_s=HANG_S)
    assert all(o.kind or o.exit_code is not None for o in outcomes), outcomes
    for o in outcomes:
        assert o.exit_code is not None or o.kind in ("RunError", "PlanError", "ValueError", "UnsupportedModel"), o.trace
    return outcomes


@contextmanager
def training(
    strategy: str = "fsdp", scheduler: str = "wfbp", collectives: Collectives = NATIVE, **job: Any
) -> Iterator[tuple[Setup, mdcs.Session]]:
    how = How(strategy, scheduler, seed=1, collectives=collectives)
    with parallel_for(Job("tied", **job), how, timeout_s=TIMEOUT_S) as (made, parallel, _):
        yield made, parallel


# ---- before step 1


def fail_after(part: str, strategy: str) -> dict[str, Any]:
    """Fail when half of the run is there, and start once more."""
    groups = len(dist.distributed_c10d._world.pg_map)
    made, found = setup("tied"), {"threads": sum(t.name.startswith("mdcs") for t in threading.enumerate())}
    fails, start = patch(part, side_effect=ArithmeticError("overflow")), parallel_for(Job("tied"), How(strategy, "wfbp"), made)
    with fails, pytest.raises(ArithmeticError), start:
        pass
    assert len(dist.distributed_c10d._world.pg_map) == groups
    found["threads"] -= sum(t.name.startswith("mdcs") for t in threading.enumerate())
    try:
        made.loss(made.model, made.batch(0, 0, 0)).backward()
        with parallel_for(Job("tied"), How(strategy, "wfbp"), made, timeout_s=TIMEOUT_S) as (_, parallel, _):
            step(made, parallel, 0)
    except mdcs.RunError as error:
        found["told"] = str(error)
    return found


@pytest.mark.parametrize("part", ["Hooks", "Recomputation", "OptimizerState"])
def test_a_start_that_fails_leaves_a_plain_model_where_it_is_whole(ranks: Ranks, part):
    """And no threads, hooks and groups; what is in pieces says why."""
    for strategy in ("dp", "zero2", "fsdp"):
        for found in ranks.run(fail_after, f"mdcs.runtime.engine.{part}", strategy):
            assert found.pop("threads") == 0
            assert strategy == "fsdp" or not found
            assert strategy != "fsdp" or "overflow" in found["told"]


def fail_on_one(part: str) -> None:
    fails = patch(part, side_effect=ArithmeticError("overflow")) if dist.get_rank() else ExitStack()
    with fails, parallel_for(Job("tied"), How("fsdp", "wfbp"), timeout_s=30.0):
        pass


def test_a_rank_that_cannot_check_the_plan_tells_the_others(ranks: Ranks):
    first, second = ranks.outcomes(fail_on_one, "mdcs.runtime.validation.keeps_order", timeout_s=20)
    assert second.kind == "ArithmeticError" and first.kind == "PlanError" and "overflow" in first.message


STARTS = {
    "if rank: plan = replace(plan, budget=1 << 30)": ("PlanError", "rank 1 has another plan"),
    "if rank: plan = mdcs.make_plan(replace(plan.profile, world=4), Uniform('dp'), Wfbp())": (
        "PlanError", "rank 1 cannot run: the plan is for 4 ranks", "the plan is for 4 ranks, the process group has 2",
    ),
    "profile = replace(plan.profile, collectives=nccl); plan = replace(plan, job=replace(plan.job, profile=profile))": (
        "PlanError", "the plan is for collectives of nccl, the process group is of gloo",
    ),
    "options = {'clip_norm': 1.0}": ("PlanError", "plan with cross_iteration=False"),
    "optimizer = optimizer_for('sgd', made.model)": (
        "ValueError", "adam with 2 state tensors per parameter, and you pass SGD with 1: pass adam",
    ),
    "if rank: made.loss(made.model, made.batch(0, 0, 0)).backward(); optimizer.step()": (
        "PlanError", "rank 1's optimizer has other state than rank 0's: load it",
    ),
    "if rank: made = setup('tied', blocks=4); units = None; optimizer = optimizer_for('adam', made.model)": (
        "ValueError", "rank 1 cannot run: the plan has 6 units", "the plan has 6 units, the model",
    ),
    "made.model.double()": ("ValueError", "is float64; the plan is for float32"),
    "plan = replace(plan, budget=plan.prediction.peak_bytes // 2)": ("PlanError", "cycle: slot"),
}  # fmt: skip
"""A fault at the start of a run; the error, with other words on rank 1 where there are others."""


def start(change: str) -> None:
    job, how, made = Job("tied"), How("random", "random", seed=1), setup("tied")
    optimizer, units = optimizer_for("adam", made.model), mdcs.partition(made.model, made.policy)
    plan = plan_for(job, how, profile_of(job, how, made, units, optimizer))
    given: dict[str, Any] = {
        "rank": dist.get_rank(), "made": made, "optimizer": optimizer, "units": units, "plan": plan, "options": {}, "mdcs": mdcs,
        "replace": dataclasses.replace, "nccl": Collectives.default("nccl"), "Uniform": Uniform, "Wfbp": Wfbp, "setup": setup,
        "optimizer_for": optimizer_for,
    }  # fmt: skip
    exec(change, given)
    made = given["made"]
    units = given["units"] or mdcs.partition(made.model, made.policy)
    mdcs.parallelize(made.model, given["optimizer"], given["plan"], units, timeout_s=TIMEOUT_S, **given["options"])


@pytest.mark.parametrize("change", STARTS)
def test_a_job_that_cannot_start(ranks: Ranks, change):
    kind, *messages = STARTS[change]
    for rank, o in enumerate(errors(ranks, start, change)):
        assert messages[rank % len(messages)] in o.message
        assert o.kind in (kind, "PlanError")


# ---- passes that raise


def backward_that_raises() -> str:
    """An error inside backward must not make the next forward pass run without the runtime."""
    with training() as (made, parallel):
        step(made, parallel, 0)
        loss = made.loss(made.model, made.batch(1, 0, 0))
        handle = made.model.blocks[0][2].weight.register_hook(_raise)
        try:
            loss.backward()
        except ArithmeticError:
            handle.remove()
        step(made, parallel, 1)
    return "went on"


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("overflow")


def test_a_backward_that_raised_cannot_be_ignored(ranks: Ranks):
    for rank, o in enumerate(errors(ranks, backward_that_raises)):
        assert f"rank {rank}, step 2: forward of embedding+head ran after a backward pass that raised: call" in o.message


# ---- ranks that die, hang or fail


def until_another_leaves(parallel: mdcs.Session) -> None:
    deadline = time.monotonic() + 30
    while not parallel._engine.failures.peer_failure() and time.monotonic() < deadline:
        time.sleep(0.1)


def fail_on_rank_one(how: str) -> None:
    """Rank 1 fails in the middle of the backward pass of step 3; rank 0 knows nothing of it."""
    rank = dist.get_rank()
    scheduler, collectives = "sequential" if "sequential" in how else "wfbp", RING if "ring" in how else NATIVE
    with training(scheduler=scheduler, collectives=collectives) as (made, parallel):

        def fail(gradient: torch.Tensor) -> None:
            if rank == 1 and parallel._engine.sequencer.step == 3:
                if how.startswith("dies"):
                    os._exit(17)
                if how.startswith("hangs"):
                    until_another_leaves(parallel)
                if how == "raises":
                    raise ArithmeticError("overflow")

        made.model.blocks[0][2].weight.register_hook(fail)
        where = {"fails in a thread": "land", "fails in the starter": "launch"}.get(how)
        if where and rank == 1:
            messages = parallel._engine.wire.messages
            real = getattr(messages, where)

            def failing(transfer: Any) -> None:
                here = where == "land" or threading.current_thread().name == "mdcs-starter"
                if here and parallel._engine.sequencer.step == 3:
                    raise ArithmeticError("overflow")
                real(transfer)

            setattr(messages, where, failing)
        for number in range(5):
            step(made, parallel, number)


@pytest.mark.parametrize("how", ["dies", *(pytest.param(f"dies, {it}", marks=pytest.mark.slow) for it in ("sequential", "ring"))])
def test_a_rank_that_dies(ranks: Ranks, how):
    survivor, dead = errors(ranks, fail_on_rank_one, how)
    assert dead.exit_code == 17
    assert survivor.kind == "RunError" and "rank 0, step 3: " in survivor.message
    assert re.search(r"message \d+ \((reduce-scatter|all-gather before the (for|back)ward) of ", survivor.message)
    assert survivor.message.endswith("(rank 1 is gone: killed, or cut off from the network)")


@pytest.mark.parametrize("how", ["hangs", pytest.param("hangs, ring", marks=pytest.mark.slow)])
def test_a_rank_that_hangs(ranks: Ranks, how):
    waiting, late = errors(ranks, fail_on_rank_one, how)
    # It has gone on into the next step as far as it could without the other.
    assert waiting.kind == "RunError" and re.match("rank 0, step [34]: .*message [0-9]+ \\(", waiting.message)
    assert late.kind == "RunError" and "rank 1" in late.message


@pytest.mark.parametrize("how", ["raises", "fails in a thread", "fails in the starter"])
def test_a_rank_that_raises(ranks: Ranks, how):
    outcomes = ranks.outcomes(fail_on_rank_one, how)
    if how == "raises":
        assert outcomes[1].kind == "ArithmeticError"  # its own error, not what followed from it
    else:
        assert outcomes[1].kind == "RunError" and re.match("rank 1, step [23]: message", outcomes[1].message)
        assert outcomes[1].message.endswith("overflow")
    assert outcomes[0].kind == "RunError" and re.match("rank 0, step [34]: .*message", outcomes[0].message)
    assert re.search(r"rank 1 left the run in step 3: .*overflow", outcomes[0].message)


def leave() -> None:
    """Rank 1 raises what only it knows of; the others have a long time to wait."""
    with parallel_for(Job("tied"), How("fsdp", "wfbp"), timeout_s=50.0) as (made, parallel, _):
        for number in range(6):
            if number == 3 and dist.get_rank() == 1:
                raise KeyError("a callback of the loop")
            step(made, parallel, number)


def test_why_a_rank_has_left_is_said_on_every_rank_at_once(ranks: Ranks):
    first, second = ranks.outcomes(leave, timeout_s=40)  # less than a message waits
    assert second.kind == "KeyError"  # its own error
    assert first.kind == "RunError" and "rank 1 left the run in step 4: KeyError: 'a callback of the loop'" in first.message


ALONE = """
import os
import signal
import torch.distributed as dist
from tests.mdcs.runtime.training import How, Job, parallel_for, setup
from tests.mdcs.runtime.test_failures import step

if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which may come before it has told why it fails
dist.init_process_group("gloo")
context = parallel_for(Job("tied"), How("fsdp", "wfbp"), timeout_s=100.0)
made, parallel, _ = context.__enter__()
for number in range(4):
    if number == 3 and dist.get_rank() == 1:
        raise KeyError("without a with block")
    step(made, parallel, number)
"""


@pytest.mark.slow
def test_under_torchrun_and_without_a_with_block(tmp_path: Path):
    script = tmp_path / "loop.py"
    script.write_text(ALONE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert "rank 1 left the run in step 4: KeyError: 'without a with block'" in done.stderr


def test_a_thread_that_asks_for_last_words_lets_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    """The store may take its time to answer: what is waited for comes about meanwhile."""
    monkeypatch.setattr(thread_transport, "LISTEN_SECONDS", 0.01)
    model, optimizer = devices.make(torch.device("cpu"))
    units, came = mdcs.partition(model, mdcs.ByLeaf()), threading.Event()
    plan = devices.plan_of(torch.device("cpu"), How("dp"))
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=5.0) as parallel:
        lock = parallel._engine.wire.lock

        def land() -> None:
            with lock:
                came.set()

        def heard() -> str:
            threading.Thread(target=land).start()
            return "" if came.wait(20) else "nobody can have the lock"

        monkeypatch.setattr(parallel._engine.wire.failures, "peer_failure", heard)
        with lock:
            parallel._engine.wire.wait(came.is_set, "what comes meanwhile")


def drain_without_rank_one() -> None:
    with training(scheduler="random") as (made, parallel):
        step(made, parallel, 0)
        if dist.get_rank() == 1:
            until_another_leaves(parallel)
        parallel.drain()


def test_a_drain_that_another_rank_does_not_join(ranks: Ranks):
    outcomes = ranks.outcomes(drain_without_rank_one, timeout_s=HANG_S)
    assert outcomes[0].kind == "RunError" and "rank 0, step 2: " in outcomes[0].message


# ---- nothing is left behind


def leftovers() -> dict[str, Any]:
    """Leftovers of a job: threads, process groups, shared memory, file descriptors, hooks."""
    shared, create = list[Path](), Pacer.create
    made = setup("tied")
    wanted = {"hooks": hook_count(made.model)}
    train_once(made)  # what torch keeps for good is there from now on
    before = open_files()
    groups = len(dist.distributed_c10d._world.pg_map)
    with patch.object(Pacer, "create", lambda path, world: shared.append(path) or create(path, world)):
        for _ in range(5):
            train_once(setup("tied"))
    assert len(shared) == (0 if dist.get_rank() else 5)
    return {
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("mdcs")],
        "groups": len(dist.distributed_c10d._world.pg_map) - groups,
        "shared memory": [path.name for path in shared if path.exists()],
        "files": open_files() - before,
        "hooks": hook_count(made.model) - wanted["hooks"],
    }


def train_once(made: Setup) -> None:
    job = Job("tied", steps=3, clip_norm=0.5)
    with parallel_for(job, How("dp", "wfbp", emulated=True), made) as (_, parallel, optimizer):
        train(job, made, parallel, optimizer)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_behind(ranks: Ranks):
    for left in ranks.run(leftovers):
        assert left["threads"] == [] and left["shared memory"] == [] and left["hooks"] == 0
        assert left["groups"] <= 0 and left["files"] <= 2, left


NEVER_CLOSED = """
import torch, mdcs
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters())
units = mdcs.partition(model, mdcs.ByLeaf())
loss = lambda: model(torch.ones(1, 4)).sum()
parallel = mdcs.parallelize(model, optimizer, mdcs.autoplan(model, optimizer, units, loss), units)
loss().backward()
parallel.step()
"""


@pytest.mark.slow
def test_a_program_that_never_closes_ends_well() -> None:
    """Its threads wait in C++ when the interpreter ends."""
    done = subprocess.run([sys.executable, "-c", NEVER_CLOSED], capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")


# ---- the thread that answers the other ranks


class Duty:
    def __init__(self) -> None:
        self.calls = 0

    def do(self, store: dist.Store) -> None:
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError("out of memory")


def fail_once() -> tuple[str, bool]:
    """Return what a rank hears when rank 0 could not do its duty, and whether rank 0's thread tried again."""
    rank, duty = dist.get_rank(), Duty()
    words = FailureChannel(ErrorContext(rank), "a run", 2)
    if rank == 0:
        words.duties.append(weakref.WeakMethod(duty.do))
    deadline = time.monotonic() + 10
    while not (words.peer_failure() and (rank or duty.calls > 1)) and time.monotonic() < deadline:
        time.sleep(0.05)
    heard = words.peer_failure()
    dist.barrier()
    words.end()
    return heard, duty.calls > 1


def test_an_error_of_the_thread_that_answers_is_published(two: Ranks):
    (heard, again), (also_heard, _) = two.run(fail_once)
    assert again and heard == also_heard and "rank 0" in heard and "out of memory" in heard


# ---- a process forked in a run ends as it likes, and the run goes on


def forking(strategy: str, error: bool) -> tuple[int, int]:
    """Status of a child that leaves the with block, and the steps of the parent, which waits for it."""
    job, child = Job("line-8-16-4", steps=2), -1
    try:
        with parallel_for(job, How(strategy)) as (made, parallel, optimizer):
            train(job, made, parallel, optimizer)
            child = os.fork()
            if not child:
                if error:
                    raise RuntimeError("the child's own")
                return 0, 0  # leaves the block as a program that is done
            status = _status(child)
            train(job, made, parallel, optimizer)
            return status, parallel.steps
    finally:
        if not child:
            signal.alarm(5)  # what follows is the end of a program: nothing is left but garbage
            made = parallel = optimizer = None
            gc.collect()
            os._exit(0)


def _status(child: int) -> int:
    for _ in range(100):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize(("strategy", "error"), [("dp", False), ("fsdp", False), ("fsdp", True)])
def test_a_child_that_leaves_the_run_ends_and_the_run_goes_on(two: Ranks, strategy: str, error: bool) -> None:
    assert two.run(forking, strategy, error) == [(0, 4)] * 2
