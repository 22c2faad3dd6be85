"""Measure how much a GPU's compute slows down while a message is in flight: the real step, beside messages of two
sizes.

The host runs ahead of the device. Messages are sent one behind the other on the communication stream, with neither the
runtime nor a wait of the host between them and the step. What a CPU's compute loses is fitted elsewhere
(:mod:`mdcs.profiler.cost_fit`).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mdcs.emulation import EmulatedCommunicator, Emulation
from mdcs.plan.cost import CostModel
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile
from mdcs.profiler.consensus import all_gather_object, barrier
from mdcs.profiler.model_snapshot import preserve_model
from mdcs.profiler.regression import p10_p90
from mdcs.runtime.communicator import Communicator
from mdcs.runtime.executor import Executor, executor_for
from mdcs.sizes import MIB
from mdcs.telemetry.memory_meter import current_meter

_SIZES, _MOST_MESSAGES = (4 * MIB, 64 * MIB), 200  # payload bytes
_BESIDE = 0.6  # of compute: how long the messages would take alone
_ROUNDS = 5
_HEAD_START_S = 0.02  # the device waits: messages are launched by then, and the launch of the step has begun


class Sample(NamedTuple):
    """Seconds of a step alone, of a step beside messages, and of the part of the latter with a message in flight."""

    alone: float
    beside: float
    overlap: float


def measure_interference(
    profile: Profile,
    model: nn.Module,
    step: Callable[[], Tensor],
    *,
    rounds: int = _ROUNDS,
    emulate: Emulation | None = None,
) -> Profile:
    """Return the profile with its interference, and the spread of steps beside messages. Collective, on a GPU.

    - ``step``: that of :func:`mdcs.profiler.model_profile.measure_profile`; the model is not changed.
    - ``rounds``: samples of each size.
    - ``emulate``: that of :func:`mdcs.parallelize`.

    Elsewhere, and in a world of one, the profile is returned as it is.
    """
    parameters = list(model.parameters())
    executor = executor_for(parameters[0].device)
    if profile.world == 1 or not executor.runs_ahead:
        return profile

    def compute() -> tuple[object, object]:
        """Launch a step; return the stamps around it."""
        begin = executor.record_timestamp()
        step().backward()
        for p in parameters:
            p.grad = None
        return begin, executor.record_timestamp()

    probes = [_Messages(profile, parameters[0], size, executor, emulate) for size in _SIZES]
    samples: list[list[Sample]] = [[] for _ in probes]
    with preserve_model(model, current_meter(parameters[0].device)):
        for _ in range(1 + rounds):  # sizes take turns, so that what else the machine does falls on all of them alike
            barrier()
            executor.sleep(_HEAD_START_S)
            begin, end = compute()
            alone = executor.seconds(end) - executor.seconds(begin)
            for probe, of_size in zip(probes, samples, strict=True):
                of_size.append(probe.beside(alone, compute))
    every = all_gather_object([of_size[1:] for of_size in samples])  # the first of each size warms up
    varied, typical = {}, []
    for i, probe in enumerate(probes):
        slowdowns = [each.beside / each.alone for of_rank in every for each in of_rank[i]]
        varied[f"step beside messages of {probe.size} bytes"] = p10_p90(slowdowns)
        of_ranks = [[statistics.median(column) for column in zip(*of_rank[i], strict=True)] for of_rank in every]
        typical.append(Sample(*(statistics.median(column) for column in zip(*of_ranks, strict=True))))
    return dataclasses.replace(profile, interference=interference(typical), spread=profile.spread | varied)


def interference(samples: list[Sample]) -> float:
    """Return how much slower compute is while a message is in flight: lost / (overlap - lost), over all samples."""
    lost, overlap = sum(s.beside - s.alone for s in samples), sum(s.overlap for s in samples)
    return max(0.0, lost / (overlap - lost)) if lost < overlap else 0.0


class _Messages:
    """Messages of one size. They and the step are launched, and then begin together."""

    def __init__(
        self, profile: Profile, like: Tensor, size: int, executor: Executor, emulate: Emulation | None
    ) -> None:
        self._profile, self._executor, self._emulated = profile, executor, emulate is not None
        collectives = profile.collectives
        self._communicator = (
            Communicator(collectives, None) if emulate is None else EmulatedCommunicator(collectives, emulate)
        )
        elements = size // like.element_size() // profile.world * profile.world
        self._buffer = torch.zeros(elements, dtype=like.dtype, device=like.device)
        self._scratch = self._buffer.new_empty(self._communicator.scratch(Kind.RS, elements))
        self._out = self._buffer.new_empty(elements // profile.world)
        self._wire = {kind: profile.wire(kind, elements * like.element_size()) for kind in (Kind.RS, Kind.AG_F)}
        seconds = sum(CostModel(profile).link_s(kind, wire) for kind, wire in self._wire.items())
        computing = sum(s.seconds for s in profile.slots)
        self._count = max(1, min(_MOST_MESSAGES, int(_BESIDE * computing / seconds))) if seconds > 0 else _MOST_MESSAGES
        self.size = size

    def beside(self, alone: float, compute: Callable[[], tuple[object, object]]) -> Sample:
        """Run the step beside the messages. Nothing waits for the device before the step has been launched."""
        executor = self._executor
        barrier()
        executor.sleep(_HEAD_START_S)
        here = executor.record_event()
        with executor.on_comm_stream():
            executor.wait_event(here)
            first = executor.record_timestamp()
            for _ in range(self._count):
                self._send()
            last, there = executor.record_timestamp(), executor.record_event()
        begin, end = compute()
        executor.wait_event(there)
        a, b, c, d = (executor.seconds(stamp) for stamp in (first, last, begin, end))
        return Sample(alone, d - c, max(0.0, min(b, d) - max(a, c)))

    def _send(self) -> None:
        for kind, wire in self._wire.items():
            self._executor.wait_works([self._communicator.launch(kind, self._buffer, self._scratch, self._out)])
            if self._emulated:
                self._executor.sleep(self._profile.link.end(kind, wire, 0.0, -math.inf))
