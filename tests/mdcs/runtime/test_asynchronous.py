"""The runtime on a device that is as asynchronous as CUDA: that its order of events suffices, and that the host runs ahead.

What CUDA would do to memory that is freed too early or read too soon is done here by construction
(:mod:`tests.mdcs.runtime.asynchronous`), whatever the timing; so is what would come of a wait that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.planner.pipeline import SCHEDULERS
from mdcs.profile.link import Collectives
from mdcs.runtime import communicator, context, initialization
from mdcs.runtime.communicator import ProcessGroups
from mdcs.runtime.executor import CudaExecutor
from mdcs.runtime.messages import Messages
from mdcs.runtime.stream_transport import StreamTransport
from tests.mdcs.runtime.asynchronous import Device
from tests.mdcs.runtime.devices import emulated_run, equal, loss_of, make, plain_run, plan_of
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, optimizer_for, setup

CPU = torch.device("cpu")
STEPS = 4
ORDERS: tuple[Sequence[str] | int, ...] = (("compute",), ("communication",), ("updates",), 1)
"""Streams that run ahead: each finds what it has not waited for, and what was freed too early; and by chance."""

Trained = tuple[list[float], dict[str, Tensor]]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


plan_for = partial(plan_of, CPU)
"""Made on the host: not what is tested."""


def train(
    plan: mdcs.Plan, device: Device, each: Callable[[mdcs.Session], object] = lambda parallel: None, **options: Any
) -> Trained:
    """A loop that pauses, evaluates and saves, every tensor of it on the device."""
    executor = CudaExecutor(CPU, device)
    with pytest.MonkeyPatch.context() as patch, device:
        patch.setattr(context, "executor_for", lambda _: executor)
        patch.setattr(communicator, "Communicator", device.connect)
        talk = ((dist, "all_gather_object"), (dist, "broadcast_object_list"), (ProcessGroups, "agree_on_call"))
        for owner, name in talk if dist.is_initialized() else ():
            patch.setattr(owner, name, device.talking(getattr(owner, name)))
        model, optimizer = make(CPU)
        units = mdcs.partition(model, mdcs.ByLeaf())
        losses = []
        with mdcs.parallelize(model, optimizer, plan, units, timeout_s=20, **options) as parallel:
            for step in range(STEPS):
                loss = loss_of(model, step, CPU)
                parallel.scaled(loss).backward()
                parallel.step()
                each(parallel)
                losses.append(loss.detach())
                if step == 1:
                    with parallel.evaluate(), torch.no_grad():
                        loss_of(model, 99, CPU)
            state = parallel.state_dict()
            records = parallel.records(flush=True)
            peak = parallel.memory()["predicted"]["total"]
        assert [r.step for r in records][-1] == STEPS and all(r.times.step_s > 0 for r in records)
        assert plan.budget is None or peak <= plan.budget
        return [device.read(x).item() for x in losses], {name: device.read(value) for name, value in state.items()}


def wrong(plan: mdcs.Plan, wanted: Trained, orders: Sequence[Any] = ORDERS) -> list[str]:
    """Faults in training by this plan, in any order of execution."""
    found = []
    for order in orders:
        device = Device(order)
        trained = train(plan, device)
        found += [f"{order}: {problem}" for problem in device.misuse[:2]]
        found += [] if equal(trained, wanted) else [f"{order}: other weights"]
    return found


# ---- the device itself


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_in_order_is_what_the_cpu_computes(order: Any):
    wanted = plain_run(CPU, STEPS)
    with Device(order) as device:
        losses, state = plain_run(CPU, STEPS)
        read = {name: device.read(value) for name, value in state.items()}
    assert equal((losses, read), wanted)
    assert device.misuse == [] and device.waits == ["aten::_local_scalar_dense"] * STEPS


def two_streams(order: Any, waits: bool) -> tuple[float, list[str]]:
    """One stream reads what another has made."""
    with Device(order) as device:
        other, event = device.Stream(), device.Event()
        with device.stream(other):
            made = torch.full((4,), 3.0)
            event.record(device.current)
        if waits:
            device.current.wait_event(event)
        return device.read(made * 2)[0].item(), device.misuse


def test_a_missing_wait_is_found():
    assert [two_streams(order, True) for order in ORDERS] == [(6.0, [])] * len(ORDERS)
    read, misuse = two_streams(("compute",), False)
    assert read != 6.0 and misuse == ["aten::mul on compute touches memory of communication before it was free"]


def test_what_is_freed_too_early_is_found():
    """The host lets go of what the other stream has not read: its own stream gives it away."""
    with Device(("compute",)) as device:
        other, event = device.Stream(), device.Event()
        made = torch.full((4,), 3.0)
        event.record(device.current)
        other.wait_event(event)
        with device.stream(other):
            doubled = made * 2
        del made
        torch.zeros(4)
        assert device.read(doubled).isnan().all()
        assert device.misuse == ["aten::mul on communication touches memory of compute after it was freed"]


# ---- the runtime


STRATEGIES = ("dp", "zero2", "sdp", "fsdp", "random")


def pairs(*shifts: int, **options: Any) -> list[How]:
    """Every scheduler with as many strategies."""
    return [
        How(STRATEGIES[(i + shift) % len(STRATEGIES)], scheduler, **{"seed": i, **options})
        for shift in shifts
        for i, scheduler in enumerate(SCHEDULERS)
    ]


BOUND = [How("fsdp", "wfbp", budget=1.0), How("random", "priority", budget=1.05), How("zero2", "dear", False)]


@pytest.mark.slow
@pytest.mark.parametrize("hows", [pairs(0), pairs(2), BOUND], ids=["one", "another", "a budget or a barrier"])
def test_one_rank_trains_like_a_plain_loop(hows: list[How]):
    wanted = plain_run(CPU, STEPS)
    for how in hows:
        assert wrong(plan_for(how), wanted) == [], how


def train_two(hows: Sequence[How]) -> list[str]:
    """Both ranks have the same batches, so their average is what one alone would do."""
    torch.set_num_threads(1)
    wanted, found = plain_run(CPU, STEPS), []
    for i, how in enumerate(hows):
        problems = wrong(plan_for(how, 2), wanted, [ORDERS[i % 2], 3 + dist.get_rank()])
        found += [f"{how.strategy}-{how.scheduler} {problem}" for problem in problems]
    return found


def test_two_ranks_train_like_a_plain_loop(two: Ranks):
    hows = [How("dp", "fusion"), How("zero2", "priority"), How("sdp", "wfbp"), How("fsdp", "dear")]
    assert two.run(train_two, hows, timeout_s=60) == [[], []]


@pytest.mark.slow
def test_two_ranks_with_every_scheduler(two: Ranks):
    assert two.run(train_two, pairs(1, 3, seed=7), timeout_s=500) == [[], []]


# ---- what is left out is found


def _after(which: str) -> Callable[[pytest.MonkeyPatch], None]:
    after = CudaExecutor.wait_event

    def only_other(self: CudaExecutor, mark: Any) -> None:
        if self.cuda.current_stream().name != which:
            after(self, mark)

    return lambda patch: patch.setattr(CudaExecutor, "wait_event", only_other)


def _free_when_enqueued(patch: pytest.MonkeyPatch) -> None:
    def free(self: StreamTransport, gradients: Any, *_: object) -> tuple[()]:
        self.free_gradients(gradients)
        return ()

    patch.setattr(StreamTransport, "_free_or_keep", free)


def _free_shards_when_enqueued(patch: pytest.MonkeyPatch) -> None:
    update = StreamTransport._update

    def then_free(self: StreamTransport, *arguments: Any) -> Any:
        end = update(self, *arguments)
        self.messages.free_shards(self._updating.pop())
        return end

    patch.setattr(StreamTransport, "_update", then_free)


def _as_when_it_was_issued(patch: pytest.MonkeyPatch) -> None:
    issue = StreamTransport.issue

    def issuing(self: StreamTransport, activations: int) -> None:
        mark = self.executor.record_event()
        patch.setattr(StreamTransport, "_mark_compute", lambda self: mark)
        issue(self, activations)

    patch.setattr(StreamTransport, "issue", issuing)


def _release_at_once(patch: pytest.MonkeyPatch) -> None:
    """Staging of compute's memory, where the stream that uses it does not own it."""
    allocate = Messages._allocate

    def outside(self: Messages, transfer: Any) -> None:
        device = torch.utils._python_dispatch._get_current_dispatch_mode()
        with device.stream(device.compute):
            allocate(self, transfer)

    patch.setattr(Messages, "_allocate", outside)


@pytest.mark.parametrize(
    ("mutate", "how"),
    [
        pytest.param(_after("communication"), How("zero2", "wfbp"), id="communication does not wait for compute"),
        pytest.param(_after("compute"), How("fsdp", "wfbp"), id="compute does not wait for messages"),
        pytest.param(_free_when_enqueued, How("dp", "wfbp"), id="gradients are freed when their message is enqueued"),
        pytest.param(_as_when_it_was_issued, How("fsdp", "wfbp"), id="a message starts before its memory is ready"),
        pytest.param(_after("updates"), How("zero2", "wfbp"), id="updates do not wait for messages"),
        pytest.param(_free_shards_when_enqueued, How("fsdp", "wfbp"), id="shards are freed before their update"),
        pytest.param(_release_at_once, How("zero2", "fusion"), id="a message's own buffers are compute's memory"),
    ],
)
@pytest.mark.slow
def test_a_mutated_runtime_is_found_out(mutate: Callable[[pytest.MonkeyPatch], None], how: How, monkeypatch: pytest.MonkeyPatch):
    plan, wanted = plan_for(how), plain_run(CPU, STEPS)
    assert wrong(plan, wanted) == []
    mutate(monkeypatch)
    assert wrong(plan, wanted) != []


@pytest.mark.parametrize("how", [How("dp", "wfbp"), How("zero2", "dear")], ids=lambda how: how.strategy)
def test_no_update_is_on_the_path_between_two_collectives(how: How, monkeypatch: pytest.MonkeyPatch):
    device, collectives, updates = Device(()), dict[int, Any](), dict[int, Any]()
    launch, update = Messages.launch, StreamTransport._update

    def launching(self: Messages, transfer: Any) -> None:
        collectives[transfer.number] = device.enqueue(device.current, "collective", lambda: None)
        launch(self, transfer)

    def updating(self: StreamTransport, done: Any, landed: Any) -> Any:
        end = update(self, done, landed)
        updates[done.transfer.number] = end.kernel
        return end

    monkeypatch.setattr(Messages, "launch", launching)
    monkeypatch.setattr(StreamTransport, "_update", updating)
    plan = replace(plan_for(how), prediction=None)  # so that compute does not wait for bytes
    train(plan, device)
    n = len(plan.messages)
    pairs = [i for i in updates if i - 1 in updates and i % n and plan.messages[i % n].slot > 0]
    assert len(pairs) >= 2 * STEPS
    for i in pairs:
        ancestors = device.ancestors(collectives[i])
        assert updates[i - 1] not in ancestors and collectives[i - 1] in ancestors
        if i - 2 in updates:
            assert updates[i - 2] in ancestors  # so few updates are outstanding


# ---- the host runs ahead


@pytest.mark.parametrize(
    ("how", "options", "waits"),
    [
        (How("dp", "wfbp"), {}, 0),
        (How("fsdp", "priority"), {}, 0),
        (How("random", "fusion", budget=1.05), {}, 0),
        (How("zero2", "wfbp", False), {"clip_norm": 0.1}, 0),
        (How("fsdp", "wfbp", False), {"loss_scale": mdcs.LossScale(8.0)}, 1),  # whether gradients are finite
    ],
)
def test_how_often_the_host_waits_in_a_step(how: How, options: dict[str, Any], waits: int):
    """Never for a slot or a message. On a device that lags, as here, for the end of the step before the last."""
    device = Device(())
    seen: list[tuple[int, int]] = []
    train(plan_for(how), device, lambda parallel: seen.append((len(device.waits), device.not_yet)), **options)
    assert (seen[-1][0] - seen[-2][0], seen[-1][1] - seen[-2][1]) == (waits, 1 - waits)
    assert device.misuse == []


def test_asking_for_records_waits_for_nothing():
    device = Device(())
    asked: list[int] = []

    def each(parallel: mdcs.Session) -> None:
        before = len(device.waits)
        asked.append(len(parallel.records()))
        assert len(device.waits) == before

    train(plan_for(How("zero2", "wfbp")), device, each)
    assert sum(asked) < STEPS  # the others are given at the end


class Stuck(Device):
    """Whose messages stop to arrive, for another rank has left: it comes to nothing any more."""

    is_stuck = False

    def come_to(self, kernel: Any) -> None:
        if not self.is_stuck:
            super().come_to(kernel)


def test_another_rank_s_error_is_heard_while_the_host_waits_for_the_device(monkeypatch: pytest.MonkeyPatch):
    """Not after the time that a message may take."""
    device, plan, destroyed = Stuck(()), plan_for(How("zero2", "wfbp")), []
    monkeypatch.setattr(ProcessGroups, "destroy", lambda groups, failed=False: destroyed.append(failed))

    def stop(parallel: mdcs.Session) -> None:
        device.is_stuck = True
        monkeypatch.setattr(parallel._engine.wire.failures, "peer_failure", lambda: "rank 1 left the run in step 2: KeyError")

    with pytest.raises(mdcs.RunError, match="rank 0, step 4: rank 1 left the run in .* to finish step 1"):
        train(plan, device, stop)
    assert destroyed == [True]
    device.is_stuck = False
    train(plan, device)
    assert destroyed == [True, False]


class Many(nn.Module):
    """Has small buffers, of two types, and one that is large."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(6):
            self.register_buffer(f"small{i}", torch.zeros(3 + i, dtype=torch.float32 if i % 2 else torch.int64))
        self.register_buffer("large", torch.zeros(2 << 20, dtype=torch.uint8))
        self.register_buffer("strided", torch.zeros(4, 6)[:, ::2])


def broadcasts() -> tuple[list[tuple[str, int]], int, list[str], list[float]]:
    """Stream and buffers of every broadcast of a step's, how often the host waits for one, what was misused; what came."""
    torch.set_num_threads(1)
    plan = plan_for(How("zero2", "wfbp"), 2)
    device, sent, send, plain = Device(("communication",)), [], initialization.broadcast_coalesced, make
    waits: list[int] = []
    steps: list[list[tuple[str, int]]] = []
    with pytest.MonkeyPatch.context() as patch:
        buffers = Many()

        def noted(tensors: list[Tensor], *options: Any) -> None:
            sent.append((device.current.name, len(tensors)))
            send(tensors, *options)

        def made(on: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
            model, optimizer = plain(on)
            model.add_module("many", buffers)
            return model, optimizer

        def each(parallel: mdcs.Session) -> None:
            for i, (_, buffer) in enumerate(buffers.named_buffers()):
                buffer.fill_(i + 1 + 10 * dist.get_rank())
            steps.append(sent[:])
            del sent[:]
            waits.append(len(device.waits))

        patch.setattr(initialization, "broadcast_coalesced", noted)
        patch.setitem(globals(), "make", made)
        train(plan, device, each, broadcast_buffers=True)
        values = [float(device.read(b).double().mean()) for _, b in buffers.named_buffers()]
    return steps[-1], waits[-1] - waits[-2], device.misuse, values


def test_buffers_go_together_and_with_the_messages(two: Ranks):
    """Not one by one over the host's group, for which the host would wait as often."""
    for sent, waits, misuse, values in two.run(broadcasts, timeout_s=60):
        assert sent == [("communication", 8)]
        assert waits <= 3 and misuse == []
        assert values == [float(i + 1) for i in range(8)]


def test_an_emulated_link_takes_its_time_on_the_device():
    """A pause per message, behind what compute has done for it."""
    device, pauses = Device(("communication",)), []
    device._compile_kernel = lambda *_: lambda args, stream: pauses.append(stream.name)  # type: ignore[method-assign]
    made, link = setup("tied"), mdcs.Link.uniform(1.0, 10.0, depth=1, emulated=True)
    executor = CudaExecutor(CPU, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "executor_for", lambda _: executor)
        parallelize = mdcs.parallelize

        def on_device(*arguments: Any, **options: Any) -> Any:
            device.__enter__()
            return parallelize(*arguments, **options)

        patch.setattr(mdcs, "parallelize", on_device)
        how = How("zero2", "wfbp", collectives=Collectives("native"))
        run = emulated_run(made, optimizer_for("adam", made.model), how, mdcs.Emulation(1, 4), link)
        device.__exit__(None, None, None)
    assert device.misuse == [] and set(pauses) == {"communication"} and len(pauses) >= 4 * len(run.plan.messages)
