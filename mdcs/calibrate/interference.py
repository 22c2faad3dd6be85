"""Measure what computing and communicating cost each other: the real step, beside messages of several sizes.

The messages are those of a *probe*: one unit of parameters of its own, that the real runtime (dispatcher, pacing,
updates) reduces and gathers in equal blocks, while the job's model computes.

On CPU the same cores compute, copy bytes and run the dispatcher: computing loses the processor time of messages,
unless there are spare cores. That time is measured while nothing computes, because other programs disturb it far less
than the difference of two step times. On CUDA computing is slowed for as long as a message is in flight: there messages are
sent one behind the other on the communication stream, with neither the runtime nor a wait of the host between them and the step.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.calibrate.agreement import advance, gathered, meet
from mdcs.calibrate.clock import machine
from mdcs.calibrate.regression import line, spread
from mdcs.calibrate.slots import untouched
from mdcs.measure.memory import current_meter
from mdcs.model.optimizers import same_options
from mdcs.model.units import ModelUnit
from mdcs.plan.cost import CostModel
from mdcs.plan.job import Job
from mdcs.plan.message import Message
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.profile.contents import Contention, Profile, Slot, Unit
from mdcs.profile.link import Kind
from mdcs.runtime.api import parallelize
from mdcs.runtime.communicator import Communicator
from mdcs.runtime.emulation import EmulatedCommunicator, Emulation
from mdcs.runtime.executor import Executor, executor_for
from mdcs.sizes import MIB

_SIZES = (MIB // 16, MIB // 4, MIB, 4 * MIB)  # payload bytes
_BESIDE = 0.6  # of computing: how long the messages of a probe would take alone
_MOST_BLOCKS, _MOST_BYTES = 40, 16 * MIB
_MOST_ROUNDS, _MOST_SECONDS = 5, 30.0
_TIMEOUT_S = 60.0
_SIZES_AHEAD, _MOST_AHEAD = (4 * MIB, 64 * MIB), 200  # on CUDA, where messages of the others' size last for microseconds
_HEAD_START_S = 0.02  # for which the device waits: messages are launched by then, and the step has begun to be


@dataclass
class Probe:
    """Medians of what one size showed, in seconds; per message unless it says step."""

    size: int
    messages: int
    wire: int  # bytes
    work: float  # copying, summing and updating, as the profile has it
    beside: float = 0.0
    processor: float = 0.0
    step_alone: float = 0.0
    step_beside: float = 0.0
    overlap: float = 0.0  # of a step: while a message was in flight
    slowdowns: list[float] = field(default_factory=list)  # of each round: step beside / step alone

    @property
    def lost(self) -> float:
        """Seconds that the step took longer beside the messages; below 0 if it was faster."""
        return self.step_beside - self.step_alone


def measure_interference(
    profile: Profile,
    model: nn.Module,
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    rounds: int | None = None,
    emulate: Emulation | None = None,
) -> Profile:
    """The profile with its interference or contention, and how many times longer the step took beside messages.

    ``step`` is that of :func:`mdcs.calibrate.slots.measure_profile`; the model is not changed. Collective: call it on
    every rank, with the same profile. A world of one has no interference. ``rounds`` samples of each size are taken; None:
    five, or fewer if the step is slow. ``emulate`` is that of :func:`mdcs.parallelize`.
    """
    if profile.world == 1:
        return profile
    parameters = list(model.parameters())
    executor = executor_for(parameters[0].device)
    if rounds is None:
        computing = (1 + len(_SIZES)) * sum(s.seconds for s in profile.slots)
        rounds = max(1, min(_MOST_ROUNDS, int(_MOST_SECONDS / computing))) if computing else _MOST_ROUNDS
    running: list[_Running | _Ahead] = []

    def compute() -> tuple[Any, Any]:
        return _compute(step, parameters, executor)

    try:
        for size in _SIZES_AHEAD if executor.runs_ahead else _SIZES:
            running.append(
                _Ahead(profile, parameters[0], size, executor, emulate)
                if executor.runs_ahead
                else _Running(profile, optimizer, parameters[0], size, emulate)
            )
        with untouched(model, current_meter(parameters[0].device)):
            for i in range(1 + rounds):  # sizes take turns, so that what else the machine does falls on all of them alike
                meet()
                advance(i / (1 + rounds))
                if executor.runs_ahead:
                    executor.pause(_HEAD_START_S)
                begin, end = compute()
                alone = executor.seconds(end) - executor.seconds(begin)
                for each in running:
                    each.measure(alone, compute)
        probes = [each.medians() for each in running]
    except BaseException as e:
        for each in running:
            each.tell(e)
        raise
    finally:
        for each in running:
            each.close()
    seen = gathered((machine(), probes))
    probes = [_median(versions) for versions in zip(*(theirs for _, theirs in seen), strict=True)]
    shown = {f"step beside messages of {p.size} bytes": spread(p.slowdowns) for p in probes}
    profile = dataclasses.replace(profile, spread=profile.spread | shown)
    if executor.runs_ahead:
        return dataclasses.replace(profile, interference=interference(probes))
    beside = Counter(name for name, _ in seen)[seen[0][0]]  # share the cores of rank 0's machine
    cores, threads = len(os.sched_getaffinity(0)), beside * torch.get_num_threads()
    fraction = min(1.0, max(0.0, 1 - (cores - threads) / beside))  # of the processor time of messages: none is spare
    return dataclasses.replace(profile, contention=contention(probes, fraction))


def interference(probes: Sequence[Probe]) -> float:
    """How much slower computing is while a message is in flight: lost / (overlap - lost), over all probes."""
    lost, overlap = sum(p.lost for p in probes), sum(p.overlap for p in probes)
    return max(0.0, lost / (overlap - lost)) if lost < overlap else 0.0


def contention(probes: Sequence[Probe], fraction: float) -> Contention:
    """Lines over the wire bytes of a message; computing loses ``fraction`` (0 to 1) of the processor time of messages.

    Computing's is fitted to processor seconds beside the work that the profile has already, the link's to seconds in flight,
    both by :func:`mdcs.calibrate.regression.line` with relative errors.
    """
    per_message, per_byte = line([(p.wire, max(0.0, p.processor - p.work)) for p in probes], relative=True)
    least_message, least_byte = line([(p.wire, p.beside) for p in probes], relative=True)
    return Contention(
        compute_per_message=fraction * per_message,
        compute_per_byte=fraction * per_byte,
        compute_per_work=fraction,
        message_seconds=least_message,
        seconds_per_byte=least_byte,
    )


class _Weight(nn.Module):
    def __init__(self, elements: int, like: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements, dtype=like.dtype, device=like.device))

    def forward(self) -> Tensor:
        return self.weight[0] * 1.0


class _Running:
    """A probe in training: all its messages are issued when its backward ends."""

    def __init__(
        self, profile: Profile, optimizer: torch.optim.Optimizer, like: Tensor, size: int, emulate: Emulation | None
    ) -> None:
        block = size // like.element_size() // profile.world * profile.world
        sent = {kind: profile.wire(kind, block * like.element_size()) for kind in (Kind.RS, Kind.AG_F)}
        seconds = sum(profile.link.beta_of(kind) * wire for kind, wire in sent.items())
        computing = sum(s.seconds for s in profile.slots)
        most = min(_MOST_BLOCKS, _MOST_BYTES // size)
        count = max(1, min(most, int(_BESIDE * computing / seconds))) if seconds > 0 else most
        unit = Unit("probe", (block * count,), True, (0, 0), (0, 0))
        slots = Slot(0, "F", 0.0, 0, 0), Slot(0, "B", 0.0, 0, 0)
        messages = tuple(Message(kind, ((0, b),), 1) for kind in sent for b in range(count))
        own = dataclasses.replace(profile, units=(unit,), slots=slots)
        plan = Plan(Job(own), (Strategy.zero1,), ((block,) * count,), messages)
        self.module = _Weight(block * count, like)
        trained = same_options(optimizer, optimizer.param_groups[0], self.module.weight)
        units = [ModelUnit("probe", (self.module,), (("weight", self.module.weight),), True)]
        self.parallel = parallelize(self.module, trained, plan, units, timeout_s=_TIMEOUT_S, emulate=emulate)
        cost = CostModel(profile)
        work = (cost.copy_s(Kind.RS, size) + cost.update_s(Kind.RS, block)) / 2  # the gather has none
        self.samples: list[Probe] = []
        self.probe = Probe(size, len(messages), sum(sent.values()) // 2, work)

    def measure(self, step_alone: float, compute: Callable[[], tuple[float, float]]) -> None:
        """One more sample: the messages beside the step, then alone."""
        meet()
        self._issue()
        begin, end = compute()
        step_beside = end - begin
        beside = self._finish()
        meet()
        processor = time.process_time()
        self._issue()
        self._finish()
        n = self.probe.messages
        self.samples.append(
            dataclasses.replace(
                self.probe,
                step_alone=step_alone,
                step_beside=step_beside,
                overlap=min(step_beside, beside),
                beside=beside / n,
                processor=(time.process_time() - processor) / n,
                slowdowns=[step_beside / step_alone],
            )
        )

    def medians(self) -> Probe:
        """Return the medians of all samples but the first, which warms up."""
        return _median(self.samples[1:])

    def close(self) -> None:
        """End it."""
        self.parallel.close(whole=False)

    def tell(self, error: BaseException) -> None:
        """Let the other ranks hear of an error here."""
        self.parallel.tell(error)

    def _issue(self) -> None:
        self.module().backward()

    def _finish(self) -> float:
        """Seconds in which a message was in flight."""
        self.parallel.drain()
        self.parallel.step()
        in_flight = self.parallel.records(flush=True)[-1].times.communication_s
        assert in_flight is not None
        return in_flight


class _Ahead:
    """Messages of one size on a device that the host runs ahead of: they and the step are launched, and then begin together."""

    def __init__(self, profile: Profile, like: Tensor, size: int, executor: Executor, emulate: Emulation | None) -> None:
        self._profile, self._executor, self._emulated = profile, executor, emulate is not None
        collectives = profile.collectives
        self._communicator = Communicator(collectives, None) if emulate is None else EmulatedCommunicator(collectives, emulate)
        elements = size // like.element_size() // profile.world * profile.world
        self._buffer = torch.zeros(elements, dtype=like.dtype, device=like.device)
        self._received = self._buffer.new_empty(collectives.buffer(Kind.RS, elements, profile.world))
        self._out = self._buffer.new_empty(elements // profile.world)
        self._wire = {kind: profile.wire(kind, elements * like.element_size()) for kind in (Kind.RS, Kind.AG_F)}
        seconds = sum(CostModel(profile).link_s(kind, wire) for kind, wire in self._wire.items())
        computing = sum(s.seconds for s in profile.slots)
        self._count = max(1, min(_MOST_AHEAD, int(_BESIDE * computing / seconds))) if seconds > 0 else _MOST_AHEAD
        self._probe = Probe(size, 2 * self._count, sum(self._wire.values()) // 2, 0.0)
        self._samples: list[Probe] = []

    def measure(self, step_alone: float, compute: Callable[[], tuple[Any, Any]]) -> None:
        """One more sample: nothing here waits for the device before the step has been launched."""
        executor = self._executor
        meet()
        executor.pause(_HEAD_START_S)
        here = executor.mark()
        with executor.communicating():
            executor.after(here)
            first = executor.stamp()
            for _ in range(self._count):
                self._send()
            last, there = executor.stamp(), executor.mark()
        begin, end = compute()
        executor.after(there)
        a, b, c, d = (executor.seconds(stamp) for stamp in (first, last, begin, end))
        self._samples.append(
            dataclasses.replace(
                self._probe,
                step_alone=step_alone,
                step_beside=d - c,
                overlap=max(0.0, min(b, d) - max(a, c)),
                beside=(b - a) / self._probe.messages,
                slowdowns=[(d - c) / step_alone],
            )
        )

    def medians(self) -> Probe:
        """Return the medians of all samples but the first, which warms up."""
        return _median(self._samples[1:])

    def close(self) -> None:
        """Do nothing: it holds memory alone."""

    def tell(self, error: BaseException) -> None:
        """Do nothing: no other rank waits in it."""

    def _send(self) -> None:
        for kind, wire in self._wire.items():
            if kind.is_gather:
                work = self._communicator.all_gather(self._buffer)
            else:
                work = self._communicator.reduce_scatter(self._buffer, self._received, self._out)
            self._executor.finish([work])
            if self._emulated:
                self._executor.pause(self._profile.link.end(kind, wire, 0.0, -math.inf))


def _compute(step: Callable[[], Tensor], parameters: Sequence[nn.Parameter], executor: Executor) -> tuple[Any, Any]:
    """Stamps before and after a step that is only computed."""
    begin = executor.stamp()
    step().backward()
    for p in parameters:
        p.grad = None
    return begin, executor.stamp()


def _median(versions: Sequence[Probe]) -> Probe:
    """Return the median of each number of a probe."""
    numbers = {
        f.name: statistics.median(getattr(v, f.name) for v in versions)
        for f in dataclasses.fields(Probe)
        if f.name not in ("size", "messages", "wire", "slowdowns")
    }
    return dataclasses.replace(versions[0], **numbers, slowdowns=[s for v in versions for s in v.slowdowns])
