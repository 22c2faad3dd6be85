"""Measure the link: every algorithm of every operation over a sweep of message sizes, on the process group itself.

Each is run as the runtime runs it (:mod:`mdcs.runtime.communicator`). The fastest of an operation is the one whose
mean is smallest at the size nearest to a block, not counting its slowest sample: some algorithms are at times twice as
slow, when two ranks happen to send one after the other. α and β are fitted to its medians. How many messages should be
in flight is measured, if asked for, with a few blocks one after the other: as few as are nearly as fast as any number.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from mdcs.calibrate import regression
from mdcs.calibrate.clock import now
from mdcs.profile.algorithms import ALGORITHMS, KIND, OPERATION, Collectives
from mdcs.profile.link import Kind, Link
from mdcs.runtime.communicator import Communicator, Running, backend_of
from mdcs.sizes import MIB

SIZES = (MIB // 16, MIB // 4, MIB, 4 * MIB)  # payload bytes
_REPEATS = 7
_SATURATED = 0.97
_BLOCKS = MIB // 4, 4 * MIB  # the smallest and the largest
_DEPTHS, _QUEUED, _NEARLY = (1, 2, 3, 4), 8, 1.05


class MeasuredLink(NamedTuple):
    """The link, the algorithms it was measured with, and how much that varied.

    ``spread`` has the 10th and 90th percentile of α (seconds) and 1/β (bytes sent per second) by operation, and of the
    bytes sent per second with so many messages in flight, if that was measured.
    """

    link: Link
    collectives: Collectives
    spread: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds of one algorithm by payload bytes, sample by sample: until its result is there (``done``), and
    until all is received, before the sum that follows (``served``).

    An algorithm is chosen by the first; α and β are fitted to the second.
    """

    operation: str
    algorithm: str
    done: dict[int, list[float]]
    served: dict[int, list[float]]

    @property
    def seconds(self) -> dict[int, float]:
        """Median seconds until the result is there, by payload bytes."""
        return {size: statistics.median(samples) for size, samples in self.done.items()}

    @property
    def link_s(self) -> dict[int, float]:
        """Median seconds until all is received, by payload bytes."""
        return {size: statistics.median(samples) for size, samples in self.served.items()}

    def expected(self, size: int) -> float:
        """Mean seconds in all but the slowest sample."""
        samples = sorted(self.done[size])
        return statistics.fmean(samples[: max(1, len(samples) - 1)])


def measure_link(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    depth: int | None = 2,
    wanted: Mapping[str, str] | None = None,
) -> MeasuredLink:
    """The algorithm of each operation, and α–β of the link with them by least squares over four sizes.

    ``depth`` is how many messages are in flight; None: measured.

    ``wanted`` names algorithms by operation; of the other operations all are measured and the fastest is taken (on a
    GPU over gloo: the default, as gloo sends little else from there). Collective: call it on every rank. A world of one
    has a link that takes no time. Raises ValueError for an algorithm that the backend does not have.
    """
    backend, wanted = backend_of(group, device), wanted or {}
    chosen = replace(Collectives.default(backend), **wanted)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    if world == 1:
        return MeasuredLink(Link((0.0,) * 4, (0.0,) * 4, depth or 1), chosen, {})
    only_default = backend == "gloo" and device.type != "cpu"
    candidates = {
        operation: (getattr(chosen, operation),) if only_default or operation in wanted else names
        for operation, names in ALGORITHMS[backend].items()
    }
    timings = measure_algorithms(device, candidates, SIZES, group=group)
    block = _link(timings, chosen, world, 1)[0].block
    nearest = min(SIZES, key=lambda size: abs(math.log(size / block)))
    for operation in candidates:
        fastest = min((t for t in timings if t.operation == operation), key=lambda t: t.expected(nearest))
        chosen = replace(chosen, **{operation: fastest.algorithm})
    link, spread = _link(timings, chosen, world, depth or 1)
    if depth is None:
        rates = measure_depths(device, chosen, link.block, group=group)
        link = replace(link, depth=max(_shallowest(by_depth) for by_depth in rates.values()))
        for operation, by_depth in rates.items():
            spread |= {f"{operation} with {n} in flight": regression.spread(samples) for n, samples in by_depth.items()}
    return MeasuredLink(link, chosen, spread)


def measure_algorithms(
    device: torch.device,
    candidates: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    repeats: int = _REPEATS,
) -> list[Timing]:
    """Times of the ``candidates`` (algorithms by operation), the same on all ranks: a message ends when it has on each.

    ``sizes`` are payload bytes; of each, ``repeats`` samples follow one that warms up. Algorithms take turns, so that what
    else the machine does falls on all of them alike. Collective: call it on every rank.
    """
    pairs = [(operation, name) for operation, names in candidates.items() for name in names]
    timings = [Timing(operation, name, {}, {}) for operation, name in pairs]
    for size in sizes:
        default = Collectives.default(backend_of(group, device))
        messages = [_Message(replace(default, **{op: name}), op, size, device, group) for op, name in pairs]
        samples = torch.tensor(
            [[_time(message, device, group) for message in messages] for _ in range(1 + repeats)],
            dtype=torch.float64, device=device,
        )[1:]  # fmt: skip
        dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=group)
        for timing, column in zip(timings, samples.transpose(0, 1).tolist(), strict=True):
            served, done = zip(*column, strict=True)
            timing.served[size], timing.done[size] = list(served), list(done)
    return timings


def measure_depths(
    device: torch.device, collectives: Collectives, block: int, *, group: dist.ProcessGroup | None = None
) -> dict[str, dict[int, list[float]]]:
    """Bytes sent per second by operation and number of messages in flight, sample by sample, the same on all ranks.

    Messages have ``block`` payload bytes. Collective: call it on every rank.
    """
    rates: dict[str, dict[int, list[float]]] = {}
    for operation, kind in KIND.items():
        messages = [_Message(collectives, operation, block, device, group) for _ in range(max(_DEPTHS))]
        samples = torch.tensor(
            [[_queue(messages[:depth], device, group) for depth in _DEPTHS] for _ in range(1 + _REPEATS)],
            dtype=torch.float64, device=device,
        )[1:]  # fmt: skip
        dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=group)
        sent = _QUEUED * collectives.sent(kind, block, dist.get_world_size(group))
        columns = samples.transpose(0, 1).tolist()
        rates[operation] = {n: [sent / s for s in column] for n, column in zip(_DEPTHS, columns, strict=True)}
    return rates


def _shallowest(rates: Mapping[int, Sequence[float]]) -> int:
    """As few messages in flight as are nearly as fast as any number."""
    medians = {depth: statistics.median(samples) for depth, samples in rates.items()}
    return min(depth for depth, rate in medians.items() if rate * _NEARLY >= max(medians.values()))


def _link(
    timings: list[Timing], collectives: Collectives, world: int, depth: int
) -> tuple[Link, dict[str, tuple[float, float]]]:
    fits, spread = {}, {}
    for t in timings:
        kind = KIND[t.operation]
        if collectives.of(kind) == t.algorithm:
            sent = {size: collectives.sent(kind, size, world) for size in t.link_s}
            fits[kind] = _alpha_beta([(sent[size], s) for size, s in t.link_s.items()])
            rounds = zip(*t.served.values(), strict=True)
            each = [_alpha_beta(list(zip(sent.values(), seconds, strict=True))) for seconds in rounds]
            spread[f"α of {t.operation}"] = regression.spread([a for a, _ in each])
            if rates := [1 / b for _, b in each if b]:
                spread[f"1/β of {t.operation}"] = regression.spread(rates)
    alpha, beta = zip(*(fits[KIND[OPERATION[kind]]] for kind in Kind), strict=True)
    block = int(max(alpha) / max(beta) * _SATURATED / (1 - _SATURATED)) if max(beta) > 0 else MIB
    return Link(alpha, beta, depth, min(max(block, _BLOCKS[0]), _BLOCKS[1])), spread


class _Message:
    """One message of ``size`` bytes with buffers of its own, to be sent again and again."""

    def __init__(
        self, collectives: Collectives, operation: str, size: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.collectives, self.kind, self.communicator = collectives, KIND[operation], Communicator(collectives, group)
        self.world = self.communicator.world
        elements = size // 4 // self.world * self.world
        self.buffer = torch.zeros(elements, device=device)
        self.received = torch.zeros(collectives.buffer(self.kind, elements, self.world), device=device)
        self.out = torch.zeros(elements // self.world, device=device)

    def start(self) -> Running:
        if self.kind is Kind.AR:
            return self.communicator.all_reduce(self.buffer, self.received)
        if self.kind is Kind.RS:
            return self.communicator.reduce_scatter(self.buffer, self.received, self.out)
        return self.communicator.all_gather(self.buffer)

    def land(self) -> None:
        """What follows the collective."""
        if self.collectives.sums_afterwards(self.kind):
            torch.sum(self.received.view(self.world, -1), dim=0, out=self.out)


def _time(message: _Message, device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Seconds until the collective is done, and until what follows it is."""
    dist.barrier(group=group)
    begin = now(device)
    message.start().wait()
    middle = now(device)
    message.land()
    return middle - begin, now(device) - begin


def _queue(messages: Sequence[_Message], device: torch.device, group: dist.ProcessGroup | None) -> float:
    """Seconds that a few messages take in a row, as many in flight as there are ``messages``."""
    in_flight: deque[Running] = deque()
    dist.barrier(group=group)
    begin = now(device)
    for number in range(_QUEUED):
        if len(in_flight) == len(messages):
            in_flight.popleft().wait()
        in_flight.append(messages[number % len(messages)].start())
    for running in in_flight:
        running.wait()
    return now(device) - begin


def _alpha_beta(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(α, β) of (bytes, seconds), neither negative; where α would be, β is still what more bytes cost."""
    alpha, beta = regression.line(points)
    return alpha, max(beta, regression.least_squares(points).slope)
