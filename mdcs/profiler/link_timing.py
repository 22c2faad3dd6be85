"""Measure the link: trains of messages by every family of algorithms, launched as the runtime does, and single
messages.

A train is a sequence of messages of one size, a few in flight. A message's scratch and result are allocated when it
starts and freed when it ends. Between the ends of two messages with equally many in flight behind both, each message
takes gap + β · bytes. This includes neither the latency nor the burst that a link lets through after a pause. A train's
time is the median over its pairs of ends, because a rank that shares its cores may see an end late. Families take
turns, so that disturbances of the machine affect all of them alike.

1. Each family sends trains in which the operations take turns, as in a plan. The sizes are two small ones, and the one
   that saturates the link: with several messages in flight and with one, because a plan has both. The family with the
   least sum of both medians is chosen.
2. The chosen family sends trains of every operation in all sizes. Gap and β are the highest line below the medians of
   every size, because disturbances only add time, and most to short trains. The latency is the least of small single
   messages. The block is the smallest message with 97 % of the link's rate, but at least 1 MiB.
3. The number of messages in flight is measured, if requested, with trains of blocks: the smallest number that is nearly
   as fast as any.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.profile.link import ALGORITHMS, KIND, Collectives, Kind, Link, operation_name
from mdcs.profiler.consensus import barrier
from mdcs.profiler.regression import Line, lower_envelope, p10_p90
from mdcs.profiler.timing import DeviceTimestamp, machine_id, stall_device
from mdcs.runtime.communicator import Communicator, NodeCommunicator, PendingCollective, ProcessGroups, backend_of
from mdcs.sizes import MIB

# payload bytes of the messages of trains; larger ones exceed a CPU's caches, and are slower
_SIZES = MIB // 4, MIB, 4 * MIB
_LARGER = 16 * MIB, 64 * MIB  # on CUDA
# smaller messages wait more often for a rank that is computing, which an idle machine does not show
_SMALLEST_BLOCK = MIB
_LONG = 1.5  # seconds: a train that would take more is not sent
_MESSAGES, _TRAIN = (6, 12), 6 * MIB  # fewest and most in a train; about so many bytes
_TURNS, _OF_CHOSEN = 3, 5  # repetitions of each train: to compare families, and of the chosen one
_ALONE, _REPEATS = MIB // 256, 15  # payload bytes of a single message, negligible on the link; repetitions
_SATURATED = 0.97
_TIMEOUT_S = 60.0
_DEPTHS, _NEARLY = (1, 2, 4), 1.05
_IN_NODES = Kind.RS_N, Kind.AG_F_N

Sender = tuple[Collectives, tuple[Kind, ...]]
"""Senders of a train: the collectives, and the kinds of messages that take turns in it."""


class MeasuredLink(NamedTuple):
    """The link, the chosen family, and the variation of the measurement.

    ``spread``: 10th and 90th percentile of α and gap (seconds) and 1/β (bytes sent per second) by operation, and, if
    measured, of the bytes sent per second by number of messages in flight.
    """

    link: Link
    collectives: Collectives
    spread: dict[str, tuple[float, float]]


def measure_link(
    device: torch.device,
    *,
    depth: int | None = 2,
    algorithm: str | None = None,
    per_node: int | None = None,
) -> MeasuredLink:
    """Return the family of algorithms, and the link's α, gap and β with it. Collective.

    - ``depth``: messages in flight; None: measured. On NCCL it is always 1.
    - ``algorithm``: name of the family; None: the fastest (on a GPU over gloo: native, because gloo's sends from rank
      to rank are for CPUs).
    - ``per_node``: ranks per host, neighbours in rank order; None: by :func:`ranks_per_node`. With several such hosts
      the chosen family is measured within them, too.

    The link of a world of one takes no time. Raises ValueError for a family that the backend does not have.
    """
    backend = backend_of(None, device)
    chosen = Collectives.default(backend) if algorithm is None else Collectives(algorithm, backend)
    depth = chosen.in_flight(depth)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return MeasuredLink(Link((0.0,) * 4, (0.0,) * 4, depth or 1), chosen, {})
    names = (
        [algorithm] if algorithm else ALGORITHMS[backend] if device.type == "cpu" or backend != "gloo" else ["native"]
    )
    families = [Collectives(name, backend) for name in names]
    ranks, in_flight = LinkBenchmark(device), depth or 2

    together: list[Sender] = [(family, tuple(KIND.values())) for family in families]
    quick = ranks.time_trains(together, _SIZES[:2], in_flight, 1)
    sizes = [*_SIZES[:2], *_larger(max(t[_SIZES[1]][0] for t in quick) / _SIZES[1], device)]
    nearest = _nearest(sizes[1:], _block(map(_line, quick)))  # the shortest trains vary most
    if len(families) > 1:
        beside, apart = (ranks.time_trains(together, [nearest], d, _TURNS) for d in (in_flight, 1))
        chosen = families[_fastest([t[nearest] for t in beside], [t[nearest] for t in apart])]
    else:
        chosen = families[0]

    kinds = tuple(KIND.values())
    trains = dict(
        zip(kinds, ranks.time_trains([(chosen, (kind,)) for kind in kinds], sizes, in_flight, _OF_CHOSEN), strict=True)
    )
    alone = ranks.time_single_messages(chosen, kinds)
    block = min(max(_block(map(_line, trains.values())), _SMALLEST_BLOCK), sizes[-1])
    per_node = ranks_per_node() if per_node is None else per_node
    if per_node:
        with ranks.of_nodes(per_node):
            found = ranks.time_trains([(chosen, (kind,)) for kind in _IN_NODES], sizes, in_flight, _OF_CHOSEN)
            trains |= zip(_IN_NODES, found, strict=True)
            alone |= ranks.time_single_messages(chosen, _IN_NODES)

    lines = {operation_name(kind): _line(train) for kind, train in trains.items()}
    sent = {operation_name(kind): chosen.sent(kind, MIB, world, per_node) / MIB for kind in trains}
    varied = {f"α of {operation_name(kind)}": p10_p90(samples) for kind, samples in alone.items()}
    for kind, train in trains.items():
        name, turns = (
            operation_name(kind),
            [_line({size: [s[i]] for size, s in train.items()}) for i in range(_OF_CHOSEN)],
        )
        varied[f"gap of {name}"] = p10_p90([turn.intercept for turn in turns])
        if rates := [sent[name] / turn.slope for turn in turns if turn.slope]:
            varied[f"1/β of {name}"] = p10_p90(rates)
    if depth is None:
        in_flight, rates_by_depth = _depth(ranks, chosen, _nearest(sizes, block))
        varied |= rates_by_depth
    latency = {operation_name(kind): min(samples) for kind, samples in alone.items()}
    by_kind = [operation_name(kind) for kind in Kind if per_node or not kind.in_node]
    link = Link(
        tuple(latency[name] for name in by_kind), tuple(lines[name].slope / sent[name] for name in by_kind), in_flight,
        block, gap=tuple(lines[name].intercept for name in by_kind), per_node=per_node,
    )  # fmt: skip
    return MeasuredLink(link, chosen, varied)


def ranks_per_node() -> int:
    """Return the ranks per host if several hosts have equally many (more than 1), in rank order; else 0. Collective.

    LOCAL_WORLD_SIZE of torchrun counts if all ranks have the same value; otherwise the machines of the ranks.
    """
    world, told = dist.get_world_size(), os.environ.get("LOCAL_WORLD_SIZE")
    seen: list[tuple[str | None, str]] = [("", "")] * world
    dist.all_gather_object(seen, (told, machine_id()))
    if told is not None and {said for said, _ in seen} == {told}:
        count = int(told)
    else:
        hosts = [host for _, host in seen]
        runs = [len(list(same)) for _, same in itertools.groupby(hosts)]
        count = runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else 0
    return count if 1 < count < world and world % count == 0 else 0


def _depth(ranks: LinkBenchmark, collectives: Collectives, size: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the best number of messages of ``size`` bytes in flight, and the bytes sent per second for each number."""
    senders: list[Sender] = [(collectives, (kind,)) for kind in KIND.values()]
    turns = [[ranks.time_trains(senders, [size], depth, 1) for depth in _DEPTHS] for _ in range(_TURNS)]
    shallowest, shown = 1, dict[str, tuple[float, float]]()
    for number, (operation, kind) in enumerate(KIND.items()):
        sent = collectives.sent(kind, size, ranks.world)
        rates = {depth: [sent / turn[i][number][size][0] for turn in turns] for i, depth in enumerate(_DEPTHS)}
        shallowest = max(shallowest, _shallowest(rates))
        shown |= {f"{operation} with {depth} in flight": p10_p90(samples) for depth, samples in rates.items()}
    return shallowest, shown


def _larger(per_byte: float, device: torch.device) -> list[int]:
    """Return the sizes beyond the first two whose train, at so many seconds per byte, takes less than ``_LONG``."""
    sizes = (*_SIZES[2:], *_LARGER) if device.type == "cuda" else _SIZES[2:]
    return [size for size in sizes if per_byte * size * _messages(size) <= _LONG]


def _fastest(beside: Sequence[Sequence[float]], apart: Sequence[Sequence[float]]) -> int:
    """Return the index of the least sum of medians: several messages in flight, and one."""
    seconds = [statistics.median(b) + statistics.median(a) for b, a in zip(beside, apart, strict=True)]
    return seconds.index(min(seconds))


def _nearest(sizes: Iterable[int], block: int) -> int:
    return min(sizes, key=lambda size: abs(math.log(size / block)))


def _line(train: Mapping[int, Sequence[float]]) -> Line:
    """Return seconds = gap + slope · payload bytes, the highest line below the medians of each size."""
    return lower_envelope([(size, statistics.median(seconds)) for size, seconds in train.items()])


def _block(lines: Iterable[Line]) -> int:
    """Return the payload bytes with which the link has 97 % of its rate: the gap is 3 % of the time."""
    blocks = [gap / slope * _SATURATED / (1 - _SATURATED) for gap, slope in lines if slope]
    return max(1, int(max(blocks, default=0)))


def _shallowest(rates: Mapping[int, Sequence[float]]) -> int:
    """Return the smallest number of messages in flight that is nearly as fast as any."""
    medians = {depth: statistics.median(samples) for depth, samples in rates.items()}
    return min(depth for depth, rate in medians.items() if rate * _NEARLY >= max(medians.values()))


def _messages(size: int) -> int:
    """Return the number of counted messages in a train."""
    return min(max(_TRAIN // size, _MESSAGES[0]), _MESSAGES[1])


class LinkBenchmark:
    """Sends trains on all ranks at once. Results are the same on all ranks, and all methods are collective."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.world = device, dist.get_world_size()
        self._groups: ProcessGroups | None = None  # groups of nodes, inside of of_nodes()
        # One counter for all: ranks may run the later steps of messages in flight in any order, so tags must differ.
        self._tags = itertools.count()

    @contextmanager
    def of_nodes(self, per_node: int) -> Iterator[None]:
        """Send messages within nodes of so many ranks, inside of the block."""
        self._groups = ProcessGroups(None, self.device, _TIMEOUT_S, needs_control=False)
        failed = True
        try:
            self._groups.connect_nodes(per_node)
            yield
            barrier()
            failed = False
        finally:
            self._groups.destroy(failed=failed)
            self._groups = None

    def time_trains(
        self, senders: Sequence[Sender], sizes: Iterable[int], depth: int, turns: int
    ) -> list[dict[int, list[float]]]:
        """Return seconds per message, by sender and payload bytes, turn by turn; ``depth`` messages are in flight."""
        samples: list[dict[int, list[float]]] = [{} for _ in senders]
        for size, _ in itertools.product(sizes, range(turns)):
            seconds = self._mean([self._train(sender, size, depth) for sender in senders])
            for own, each in zip(samples, seconds, strict=True):
                own.setdefault(size, []).append(each)
        return samples

    def time_single_messages(self, collectives: Collectives, kinds: Sequence[Kind]) -> dict[Kind, list[float]]:
        """Return seconds of single small messages, by kind."""
        samples = [self._mean([self._single(collectives, kind) for kind in kinds]) for _ in range(1 + _REPEATS)]
        columns = zip(*samples[1:], strict=True)  # the first warms up
        return {kind: list(column) for kind, column in zip(kinds, columns, strict=True)}

    def message(self, collectives: Collectives, kind: Kind, size: int) -> ProbeMessage:
        """Return a message of ``size`` payload bytes."""
        buffer = torch.zeros(size // 4 // self.world * self.world, device=self.device)
        if self._groups is None:
            return ProbeMessage(Communicator(collectives, None, self._tags), kind, buffer)
        node, across = (
            Communicator(collectives, group, self._tags)
            for group in (self._groups.node_group, self._groups.replica_group)
        )
        return ProbeMessage(NodeCommunicator(node, across), kind, buffer)

    def _mean(self, seconds: list[float]) -> list[float]:
        """Return the means over the ranks."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found)
        mean: list[float] = (found / self.world).tolist()
        return mean

    def _train(self, sender: Sender, size: int, depth: int) -> float:
        """Return seconds per message: the median over pairs of ends with equally many messages in flight behind them.

        Between the ends of a pair there are equally many messages of each kind.
        """
        collectives, kinds = sender
        messages = [self.message(collectives, kind, size) for _ in range(depth) for kind in kinds]
        stride = len(messages)  # some algorithms end all messages in flight at once
        counted = -(-_messages(size) * len(kinds) // stride) * stride
        barrier()
        in_flight = deque(message.start() for message in messages[:depth])
        ends = []
        for ended in range(counted + depth):
            in_flight.popleft().wait()
            ends.append(DeviceTimestamp(self.device))
            messages[ended % stride].free()
            if ended < counted:
                in_flight.append(messages[(ended + depth) % stride].start())
        return statistics.median(
            ends[i].until(ends[j]) / (j - i) for i in range(counted) for j in range(i + stride, counted + 1, stride)
        )

    def _single(self, collectives: Collectives, kind: Kind) -> float:
        message = self.message(collectives, kind, _ALONE)
        barrier()
        stall_device(self.device)
        begin = DeviceTimestamp(self.device)
        message.start().wait()
        return begin.until(DeviceTimestamp(self.device))


class ProbeMessage:
    """One message, launched again and again; its scratch and its result are allocated each time."""

    def __init__(self, communicator: Communicator | NodeCommunicator, kind: Kind, buffer: Tensor) -> None:
        self._communicator, self._kind, self.buffer = communicator, kind, buffer
        self._scratch: Tensor | None = None
        self._out: Tensor | None = None

    def start(self) -> PendingCollective:
        """Allocate and launch, as :class:`mdcs.runtime.messages.Messages` does for a message of one block."""
        elements = self.buffer.numel()
        if scratch := self._communicator.scratch(self._kind, elements):
            self._scratch = self.buffer.new_empty(scratch)
        if self._kind.plain is Kind.RS:
            self._out = self.buffer.new_empty(elements // self._communicator.world)
        return self._communicator.launch(self._kind, self.buffer, self._scratch, self._out)

    def free(self) -> None:
        """Free what the message has allocated."""
        self._scratch = self._out = None
