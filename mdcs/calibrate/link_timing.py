"""Measure the link: trains of messages by every algorithm, sent as the runtime sends them, and single messages.

A train is a sequence of messages of one size, a few in flight. A message's buffers are allocated when it starts, and
summed and freed when it ends (:mod:`mdcs.runtime.communicator`). Between the ends of two messages with equally many in
flight behind both, each message takes gap + β · bytes. This includes neither the latency nor the burst that a link lets
through after a pause. A train's time is the median over its pairs of ends, because a rank that shares its cores may see
an end late. Algorithms take turns, so that disturbances of the machine affect all of them alike.

1. All algorithms send trains of two sizes once.
2. Algorithms near the fastest at either size send trains of the size that saturates the link, and single messages of
   this size, because a plan has both. An algorithm whose ranks send to each other in turns fills the link with two
   messages in flight, and half of it with one. The fastest has the least sum of both medians.
3. Operations share the link, and the fastest algorithm of one operation may be slow beside those of the others: two
   algorithms that send over different connections took 10 to 25 % longer in turns than apart (docs/results.md). Trains
   in which the operations take turns therefore decide between the fastest of each and one algorithm for all.
4. The chosen algorithms send all sizes. Gap and β are the highest line below the medians of every size, because
   disturbances only add time, and most to short trains. The latency is the least of small single messages.
5. The number of messages in flight is measured, if requested, with trains of blocks: the smallest number that is nearly
   as fast as any.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mdcs.calibrate.agreement import meet
from mdcs.calibrate.clock import Mark, hold_back, machine
from mdcs.calibrate.regression import Line, below, spread
from mdcs.profile.algorithms import ALGORITHMS, KIND, Collectives, name_of
from mdcs.profile.link import Kind, Link
from mdcs.runtime.communicator import Communicator, NodeCommunicator, Running, backend_of
from mdcs.runtime.groups import Groups
from mdcs.sizes import MIB

_SIZES = MIB // 4, MIB, 4 * MIB  # payload bytes of the messages of trains; larger ones exceed a CPU's caches, and are slower
_LARGER = 16 * MIB, 64 * MIB  # on CUDA
_LONG = 1.5  # seconds: a train that would take more is not sent
_MESSAGES, _TRAIN = (6, 12), 6 * MIB  # fewest and most in a train; about so many bytes
_TURNS, _OF_CHOSEN = 3, 5  # repetitions of each train: to compare algorithms, and of the chosen ones
_NEAR = 1.3  # up to so many times slower than the fastest: may be the fastest in another turn
_ALONE, _REPEATS = MIB // 256, 15  # payload bytes of a single message, negligible on the link; repetitions
_SATURATED = 0.97
_TIMEOUT_S = 60.0
_DEPTHS, _NEARLY = (1, 2, 4), 1.05


class MeasuredLink(NamedTuple):
    """The link, the chosen algorithms, and the variation of the measurement.

    ``spread``: 10th and 90th percentile of α and gap (seconds) and 1/β (bytes sent per second) by operation, and, if
    measured, of the bytes sent per second by number of messages in flight.
    """

    link: Link
    collectives: Collectives
    spread: dict[str, tuple[float, float]]


@dataclass(frozen=True)
class Timing:
    """Seconds per message in trains of one algorithm, by payload bytes, turn by turn; the same on all ranks."""

    operation: str
    collectives: Collectives
    samples: dict[int, list[float]] = field(default_factory=dict)
    in_node: bool = False

    @property
    def kind(self) -> Kind:
        """Kind of its messages."""
        return Kind(f"{KIND[self.operation]}_N") if self.in_node else KIND[self.operation]

    @property
    def name(self) -> str:
        """Name of the operation; it says if it is within nodes."""
        return name_of(self.kind)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return self.collectives.of(self.kind)

    @property
    def seconds(self) -> dict[int, float]:
        """Medians over the turns, by payload bytes."""
        return {size: statistics.median(samples) for size, samples in self.samples.items()}

    def turn(self, number: int) -> Timing:
        """Return the samples of one turn."""
        return replace(self, samples={size: [samples[number]] for size, samples in self.samples.items()})


def measure_link(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    depth: int | None = 2,
    wanted: Mapping[str, str] | None = None,
    per_node: int | None = None,
) -> MeasuredLink:
    """Return the algorithm of each operation, and the link's α, gap and β with them. Collective.

    - ``depth``: messages in flight; None: measured. On NCCL it is always 1.
    - ``wanted``: algorithms by operation. Of the other operations all algorithms are measured and the fastest is chosen
      (on a GPU over gloo: the default, because gloo supports little else there).
    - ``per_node``: ranks per host, neighbours in rank order; None: by :func:`ranks_per_node`. With several such hosts
      the chosen algorithms are measured within them, too.

    The link of a world of one takes no time. Raises ValueError for an algorithm that the backend does not have.
    """
    backend, wanted = backend_of(group, device), wanted or {}
    chosen = replace(Collectives.default(backend), **wanted)
    depth = chosen.in_flight(depth)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    if world == 1:
        return MeasuredLink(Link((0.0,) * 4, (0.0,) * 4, depth or 1), chosen, {})
    only_default = backend == "gloo" and device.type != "cpu"
    candidates = {
        operation: (getattr(chosen, operation),) if only_default or operation in wanted else names
        for operation, names in ALGORITHMS[backend].items()
    }
    ranks, in_flight = _Ranks(device, group), depth or 2
    timings = ranks.timings(candidates)
    ranks.trains(timings, _SIZES[:2], in_flight, 1)
    near = [t for t in timings if _is_near(t, timings)]
    sizes = [*_SIZES[:2], *_larger(near, device)]
    nearest = _nearest(sizes[1:], _block(_lines(near)))  # the shortest trains vary most
    one_by_one = [replace(t, samples={}) for t in near]
    ranks.trains(near, [nearest], in_flight)
    ranks.trains(one_by_one, [nearest], 1)
    teams = _teams(near, _fastest(near, one_by_one, nearest))
    if len(teams) > 1:
        apart = {(t.operation, t.algorithm): t.seconds[nearest] for t in one_by_one}
        took = ranks.together(teams, nearest, in_flight)
        fastest = _fastest_team(teams, took, apart)
    else:
        fastest = teams[0]
    ranks.trains(fastest, sizes, in_flight, _OF_CHOSEN)
    alone = ranks.alone(fastest)
    block = min(max(_block(_lines(fastest)), sizes[0]), sizes[-1])
    chosen = replace(chosen, **{t.operation: t.algorithm for t in fastest})
    per_node = ranks_per_node(group) if per_node is None else per_node
    within = []
    if per_node:
        sharded = [t for t in fastest if t.operation != "all_reduce"]
        within = [replace(t, collectives=chosen, samples={}, in_node=True) for t in sharded]
        with ranks.of_nodes(per_node):
            ranks.trains(within, sizes, in_flight, _OF_CHOSEN)
            alone |= ranks.alone(within)

    measured = [*fastest, *within]
    lines, turns = _lines(measured), [_lines([t.turn(number) for t in measured]) for number in range(_OF_CHOSEN)]
    sent = {t.kind: _sent(chosen, t.kind, world, per_node) / MIB for t in measured}
    varied = {f"α of {operation}": spread(samples) for operation, samples in alone.items()}
    for t in measured:
        varied[f"gap of {t.name}"] = spread([turn[t.name].intercept for turn in turns])
        if rates := [sent[t.kind] / turn[t.name].slope for turn in turns if turn[t.name].slope]:
            varied[f"1/β of {t.name}"] = spread(rates)
    if depth is None:
        in_flight, rates_by_depth = _depth(ranks, fastest, _nearest(sizes, block))
        varied |= rates_by_depth
    by_kind = [
        (min(alone[name]), lines[name].intercept, lines[name].slope * MIB / _sent(chosen, kind, world, per_node))
        for kind, name in ((kind, name_of(kind)) for kind in Kind if per_node or not kind.in_node)
    ]
    alphas, gaps, betas = zip(*by_kind, strict=True)
    return MeasuredLink(Link(alphas, betas, in_flight, block, gap=gaps, per_node=per_node), chosen, varied)


def ranks_per_node(group: dist.ProcessGroup | None = None) -> int:
    """Return the ranks per host if several hosts have equally many (more than 1), in rank order; else 0. Collective.

    LOCAL_WORLD_SIZE of torchrun counts if all ranks have the same value; otherwise the machines of the ranks.
    """
    world = dist.get_world_size(group)
    told = os.environ.get("LOCAL_WORLD_SIZE") if world == dist.get_world_size() else None
    seen: list[tuple[str | None, str]] = [("", "")] * world
    dist.all_gather_object(seen, (told, machine()), group=group)
    if told is not None and {said for said, _ in seen} == {told}:
        count = int(told)
    else:
        hosts = [host for _, host in seen]
        runs = [len(list(same)) for _, same in itertools.groupby(hosts)]
        count = runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else 0
    return count if 1 < count < world and world % count == 0 else 0


def _sent(collectives: Collectives, kind: Kind, world: int, per_node: int) -> int:
    """Return the bytes that a rank sends for a payload of 1 MiB."""
    if kind.in_node:
        return collectives.sent_by_node(kind, MIB, per_node, world // per_node)
    return collectives.sent(kind, MIB, world)


def measure_trains(
    device: torch.device,
    candidates: Mapping[str, Iterable[str]],
    sizes: Iterable[int],
    *,
    group: dist.ProcessGroup | None = None,
    depth: int = 2,
    turns: int = _TURNS,
) -> list[Timing]:
    """Return trains of the ``candidates`` for every size, with ``depth`` messages in flight. Collective.

    ``candidates``: algorithms by operation. ``sizes``: payload bytes.
    """
    ranks = _Ranks(device, group)
    timings = ranks.timings(candidates)
    ranks.trains(timings, sizes, depth, turns)
    return timings


def measure_turns(
    device: torch.device,
    teams: Sequence[Collectives],
    sizes: Iterable[int],
    *,
    group: dist.ProcessGroup | None = None,
    depth: int = 2,
) -> list[list[float]]:
    """Return seconds per message, by team and size, of trains in which the three operations take turns. Collective."""
    ranks = _Ranks(device, group)
    timings = [[Timing(operation, team) for operation in KIND] for team in teams]
    return [list(seconds) for seconds in zip(*(ranks.together(timings, size, depth) for size in sizes), strict=True)]


def _depth(ranks: _Ranks, timings: Sequence[Timing], size: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Return the best number of messages of ``size`` bytes in flight, and the bytes sent per second for each number."""
    trains = {depth: [replace(t, samples={}) for t in timings] for depth in _DEPTHS}
    for turn in range(_TURNS):
        for depth, own in trains.items():
            ranks.trains(own, [size], depth, turn + 1)
    shallowest, shown = 1, dict[str, tuple[float, float]]()
    for number, t in enumerate(timings):
        sent = t.collectives.sent(KIND[t.operation], size, ranks.world)
        rates = {depth: [sent / seconds for seconds in own[number].samples[size]] for depth, own in trains.items()}
        shallowest = max(shallowest, _shallowest(rates))
        shown |= {f"{t.operation} with {depth} in flight": spread(samples) for depth, samples in rates.items()}
    return shallowest, shown


def _larger(timings: Iterable[Timing], device: torch.device) -> list[int]:
    """Return the sizes beyond the first two whose train takes less than ``_LONG`` seconds."""
    most = max(t.seconds[_SIZES[1]] / _SIZES[1] for t in timings)
    sizes = (*_SIZES[2:], *_LARGER) if device.type == "cuda" else _SIZES[2:]
    return [size for size in sizes if most * size * _messages(size) <= _LONG]


def _is_near(timing: Timing, timings: Iterable[Timing]) -> bool:
    """Return whether the algorithm is nearly the fastest of its operation at any size: a train may have been disturbed.
    """
    others = [t for t in timings if t.operation == timing.operation]
    return any(s <= _NEAR * min(t.seconds[size] for t in others) for size, s in timing.seconds.items())


def _fastest(timings: Sequence[Timing], one_by_one: Sequence[Timing], size: int) -> list[Timing]:
    """Return the fastest of each operation, by the sum of both medians: several messages in flight, and one."""
    best: dict[str, tuple[float, Timing]] = {}
    for t, alone in zip(timings, one_by_one, strict=True):
        seconds = t.seconds[size] + alone.seconds[size]
        if t.operation not in best or seconds < best[t.operation][0]:
            best[t.operation] = seconds, t
    return [t for _, t in best.values()]


def _teams(timings: Iterable[Timing], fastest: Sequence[Timing]) -> list[list[Timing]]:
    """Return teams of one algorithm per operation: the fastest ones, and each shared algorithm where available."""
    own = {(t.operation, t.algorithm): t for t in timings}
    shared = [name for name, count in Counter(name for _, name in own).items() if count > 1]
    teams = [list(fastest)]
    for name in shared:
        team = [own.get((t.operation, name), t) for t in fastest]
        if team not in teams:
            teams.append(team)
    return teams


def _fastest_team(
    teams: Sequence[list[Timing]], together: Sequence[float], apart: Mapping[tuple[str, str], float]
) -> list[Timing]:
    """Return the team with the least seconds per message, ``together`` plus the mean of ``apart``.

    ``together``: by team, in turns with several messages in flight. ``apart``: by (operation, algorithm), with one.
    """
    seconds = [
        beside + statistics.mean(apart[t.operation, t.algorithm] for t in team)
        for team, beside in zip(teams, together, strict=True)
    ]
    return teams[seconds.index(min(seconds))]


def _nearest(sizes: Iterable[int], block: int) -> int:
    return min(sizes, key=lambda size: abs(math.log(size / block)))


def _lines(timings: Iterable[Timing]) -> dict[str, Line]:
    """Return by operation: seconds = gap + slope · payload bytes, the highest line below the medians of each size."""
    samples: dict[str, dict[int, list[float]]] = {}
    for t in timings:
        for size, seconds in t.samples.items():
            samples.setdefault(t.name, {}).setdefault(size, []).extend(seconds)
    return {
        operation: below([(size, statistics.median(seconds)) for size, seconds in by_size.items()])
        for operation, by_size in samples.items()
    }


def _block(lines: Mapping[str, Line]) -> int:
    """Return the payload bytes with which the link has 97 % of its rate: the gap is 3 % of the time."""
    blocks = [gap / slope * _SATURATED / (1 - _SATURATED) for gap, slope in lines.values() if slope]
    return max(1, int(max(blocks, default=0)))


def _shallowest(rates: Mapping[int, Sequence[float]]) -> int:
    """Return the smallest number of messages in flight that is nearly as fast as any."""
    medians = {depth: statistics.median(samples) for depth, samples in rates.items()}
    return min(depth for depth, rate in medians.items() if rate * _NEARLY >= max(medians.values()))


def _messages(size: int) -> int:
    """Return the number of counted messages in a train."""
    return min(max(_TRAIN // size, _MESSAGES[0]), _MESSAGES[1])


class _Ranks:
    """Sends trains on all ranks of a group at once; results are the same on all ranks."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.device, self.group, self.world = device, group, dist.get_world_size(group)
        self._groups: Groups | None = None  # groups of nodes, inside of of_nodes()
        # One counter for all: ranks may run the later steps of messages in flight in any order, so tags must differ.
        self._tags = itertools.count()

    @contextmanager
    def of_nodes(self, per_node: int) -> Iterator[None]:
        """Send messages within nodes of so many ranks, inside of the block."""
        self._groups = Groups(self.group, self.device, _TIMEOUT_S, needs_control=False, per_node=per_node)
        yield
        meet(self.group)
        self._groups.destroy()
        self._groups = None

    def communicator(self, timing: Timing) -> Communicator | NodeCommunicator:
        """Return the communicator of its messages."""
        if self._groups is None:
            return Communicator(timing.collectives, self.group, self._tags)
        groups = self._groups.node, self._groups.across
        node, across = (Communicator(timing.collectives, group, self._tags) for group in groups)
        return NodeCommunicator(node, across)

    def timings(self, candidates: Mapping[str, Iterable[str]]) -> list[Timing]:
        """Return an empty Timing per candidate (algorithms by operation)."""
        default = Collectives.default(backend_of(self.group, self.device))
        pairs = ((operation, name) for operation, names in candidates.items() for name in names)
        return [Timing(operation, replace(default, **{operation: name})) for operation, name in pairs]

    def trains(self, timings: Sequence[Timing], sizes: Iterable[int], depth: int, turns: int = _TURNS) -> None:
        """Send trains of each size until every algorithm has sent it in so many turns."""
        for size in sizes:
            while behind := [t for t in timings if len(t.samples.get(size, ())) < turns]:
                for t, seconds in zip(behind, self._mean([self._train([t], size, depth) for t in behind]), strict=True):
                    t.samples.setdefault(size, []).append(seconds)

    def together(self, teams: Sequence[Sequence[Timing]], size: int, depth: int) -> list[float]:
        """Return median seconds per message, by team, of trains in which the team's operations take turns."""
        turns = [self._mean([self._train(team, size, depth) for team in teams]) for _ in range(_TURNS)]
        return [statistics.median(column) for column in zip(*turns, strict=True)]

    def alone(self, timings: Sequence[Timing]) -> dict[str, list[float]]:
        """Return seconds of single small messages, by operation."""
        samples = [self._mean([self._single(t) for t in timings]) for _ in range(1 + _REPEATS)]
        columns = zip(*samples[1:], strict=True)  # the first warms up
        return {t.name: list(column) for t, column in zip(timings, columns, strict=True)}

    def _mean(self, seconds: list[float]) -> list[float]:
        """Return the means over the ranks."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, group=self.group)
        mean: list[float] = (found / self.world).tolist()
        return mean

    def _train(self, timings: Sequence[Timing], size: int, depth: int) -> float:
        """Return seconds per message: the median over pairs of ends with equally many messages in flight behind them.

        Messages of several timings take turns; between the ends of a pair there are equally many of each.
        """
        messages = [_Message(timing, size, self) for _ in range(depth) for timing in timings]
        stride = len(messages)  # some algorithms end all messages in flight at once
        counted = -(-_messages(size) * len(timings) // stride) * stride
        meet(self.group)
        in_flight = deque(message.start() for message in messages[:depth])
        ends, unused = [], [0.0]
        for ended in range(counted + depth):
            in_flight.popleft().wait()
            ends.append(Mark(self.device))
            message = messages[ended % stride]
            message.land()
            # A sum while nothing is in flight is not link time.
            unused.append(unused[-1] + (0.0 if in_flight or not message.sums else ends[-1].until(Mark(self.device))))
            if ended < counted:
                in_flight.append(messages[(ended + depth) % stride].start())
        return statistics.median(
            (ends[i].until(ends[j]) - (unused[j] - unused[i])) / (j - i)
            for i in range(counted)
            for j in range(i + stride, counted + 1, stride)
        )

    def _single(self, timing: Timing) -> float:
        message = _Message(timing, _ALONE, self)
        meet(self.group)
        hold_back(self.device)
        begin = Mark(self.device)
        message.start().wait()
        return begin.until(Mark(self.device))


class _Message:
    """One message, sent again and again; its other buffers are allocated each time."""

    def __init__(self, timing: Timing, size: int, ranks: _Ranks) -> None:
        self.collectives, self.kind = timing.collectives, timing.kind
        self.sums = self.collectives.sums_afterwards(self.kind)
        self.communicator, self.world = ranks.communicator(timing), ranks.world
        self.buffer = torch.zeros(size // 4 // ranks.world * ranks.world, device=ranks.device)
        self.received: Tensor | None = None
        self.out: Tensor | None = None

    def start(self) -> Running:
        elements = self.buffer.numel()
        if self.kind.is_gather:
            return self.communicator.all_gather(self.buffer)
        if isinstance(self.communicator, NodeCommunicator):
            self.world, nodes = self.communicator.levels
            self.received = self.buffer.new_empty(self.collectives.buffer_by_node(self.kind, elements, self.world, nodes))
        elif self.collectives.of(self.kind) != "native":
            self.received = self.buffer.new_empty(self.collectives.buffer(self.kind, elements, self.world))
        if isinstance(self.communicator, Communicator) and self.kind is Kind.AR:
            return self.communicator.all_reduce(self.buffer, self.received)
        self.out = self.buffer.new_empty(elements // self.world)
        return self.communicator.reduce_scatter(self.buffer, self.received, self.out)

    def land(self) -> None:
        """Sum what the collective leaves to sum, and free."""
        if self.sums:
            assert self.received is not None
            torch.sum(self.received.view(self.world, -1), dim=0, out=self.out)
        self.received = self.out = None
