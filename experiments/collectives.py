"""Measure the collective algorithms against each other, on the ranks and the device of the config.

    mdcs collectives cluster.ranks=2
    mdcs collectives cluster=shaped cluster.ranks=4 cluster.rate_gbit=2

`experiment=collectives` has four ranks. The table has median milliseconds per message in trains of messages, by family
of algorithms and message size: trains of each operation, and trains in which the operations take turns, as in a plan.
* marks the fastest. The table also has the bytes that one rank sends and its buffer, per byte of the message, and the
rate of the largest message. A picture is left in the job's folder.

On an emulated link both families would be equal, so this program always measures the real link.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from analysis import pictures
from analysis.pictures.comparisons import size_label
from analysis.table import new_console, new_table
from experiments.config.checks import load
from experiments.config.schema import Config
from experiments.job import app
from experiments.job import run as jobs
from launch import network
from launch.rank import AGENT_PID
from mdcs.profile.link import ALGORITHMS, KIND, Collectives, Kind
from mdcs.profiler.timing import DeviceTimestamp
from mdcs.runtime.communicator import Communicator, PendingCollective
from mdcs.sizes import MIB

SIZES = tuple(2**power for power in range(16, 25, 2))  # 64 KiB to 16 MiB
TRAINS: dict[str, tuple[Kind, ...]] = {operation: (kind,) for operation, kind in KIND.items()}
TRAINS["in turns"] = tuple(KIND.values())
"""Name of a train -> the kinds of messages that take turns in it."""
FILE, PICTURE = "collectives.json", "collectives.png"
_TURNS = 3  # repetitions of a train
_MESSAGES, _TRAIN = (6, 12), 6 * MIB  # fewest and most in a train; about so many bytes

Sender = tuple[Collectives, tuple[Kind, ...]]
"""Senders of a train: the collectives, and the kinds of messages that take turns in it."""


def main() -> int:
    """Run the measurements of the command line and print the table. Return the exit code."""
    console = new_console(110)

    def compare(config: Config, folder: Path) -> str:
        if config.cluster.emulated:
            return "cluster.name: emulated ranks send nothing to compare"
        if config.cluster.ranks < 2:
            return "cluster.ranks: must be >= 2 to compare collectives, got 1"
        config.run.name = config.run.name or "collectives"
        folder.mkdir(parents=True, exist_ok=True)
        outcome = jobs.run(config, folder, console, only="plan", worker="experiments.collectives")
        if outcome.ok:
            about = config.cluster.ranks, config.cluster.resolved_backend(), shaped_link(config)
            rows = json.loads((folder / FILE).read_text(encoding="utf-8"))["rows"]
            console.print(table(rows, *about))
            title = f"{about[1]}, {about[0]} ranks{about[2]}: median time per message"
            drawn = pictures.save(pictures.collectives(rows, SIZES, title), folder / PICTURE)
            console.print(f"drawn in {drawn}", soft_wrap=True)
        return outcome.reason

    return app.run(app.Program(compare))


def measure(folder: Path) -> None:
    """Run the measurements of one rank. Rank 0 writes the results."""
    from experiments.job.worker import start
    from launch import status

    config = load(folder / "config.yaml")
    device, backend = start(config), config.cluster.resolved_backend()
    ranks = LinkBenchmark(device)
    families = [Collectives(name, backend) for name in ALGORITHMS[backend]]
    senders: list[Sender] = [(family, kinds) for kinds in TRAINS.values() for family in families]
    trains: list[list[dict[int, list[float]]]] = []  # in small parts: a rank must report its status often
    for size in SIZES:
        status.set()
        trains.append(ranks.time_trains(senders, [size], 2, _TURNS))
    if dist.get_rank() == 0:
        rows = [
            {"operation": operation, "algorithm": family.algorithm, "seconds": _medians(own)}
            for (operation, family), own in zip(
                itertools.product(TRAINS, families), zip(*trains, strict=True), strict=True
            )
        ]
        (folder / FILE).write_text(json.dumps({"rows": rows}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


class LinkBenchmark:
    """Sends trains on all ranks at once. Results are the same on all ranks, and all methods are collective.

    A train is a sequence of messages of one size, a few in flight. A message's scratch and result are allocated when it
    starts and freed when it ends. Its time is the median over pairs of ends, because a rank that shares its cores may
    see an end late. Families take turns, so that disturbances of the machine affect all of them alike.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.world = device, dist.get_world_size()
        # One counter for all: ranks may run the later steps of messages in flight in any order, so tags must differ.
        self._tags = itertools.count()

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
        messages = [self._message(collectives, kind, size) for _ in range(depth) for kind in kinds]
        stride = len(messages)  # some algorithms end all messages in flight at once
        counted = -(-_messages(size) * len(kinds) // stride) * stride
        dist.barrier()
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

    def _message(self, collectives: Collectives, kind: Kind, size: int) -> ProbeMessage:
        buffer = torch.zeros(size // 4 // self.world * self.world, device=self.device)
        return ProbeMessage(Communicator(collectives, None, self._tags), kind, buffer)


class ProbeMessage:
    """One message, launched again and again; its scratch and its result are allocated each time."""

    def __init__(self, communicator: Communicator, kind: Kind, buffer: Tensor) -> None:
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


def _messages(size: int) -> int:
    """Return the number of counted messages in a train."""
    return min(max(_TRAIN // size, _MESSAGES[0]), _MESSAGES[1])


def _medians(trains: Iterable[dict[int, list[float]]]) -> list[float]:
    """Median seconds by size, of trains of one size each."""
    return [statistics.median(seconds) for train in trains for seconds in train.values()]


def shaped_link(config: Config) -> str:
    """The shaped link for a title; empty for a link that is not shaped."""
    link = config.cluster.shaped_link()
    return f", link shaped to {link} ({network.congestion_control()})" if link else ""


def table(rows: list[dict[str, Any]], world: int, backend: str, link: str = "") -> Table:
    """The table of algorithms. ``seconds`` of a row is by size; bytes sent and buffer are per byte of the message."""
    left, title = ("operation", "algorithm"), f"{backend}, {world} ranks{link}: median ms per message"
    made = new_table(title, (*left, *map(size_label, SIZES), "sent", "buffer", "Gbit/s"), left, no_wrap=True)
    largest = SIZES[-1]
    for operation, kinds in TRAINS.items():
        own = [row for row in rows if row["operation"] == operation]
        fastest = [min(seconds) for seconds in zip(*(row["seconds"] for row in own), strict=True)]
        for row in own:
            collectives = Collectives(row["algorithm"], backend)
            sent = statistics.mean(collectives.sent(kind, largest, world) for kind in kinds)
            buffer = max(collectives.buffer(kind, largest, world) for kind in kinds)
            times = (
                f"{'*' if s == best else ''}{s * 1e3:.2f}" for s, best in zip(row["seconds"], fastest, strict=True)
            )
            rate = sent * 8e-9 / row["seconds"][-1]
            made.add_row(
                operation, row["algorithm"], *times, f"{sent / largest:.2f}", f"{buffer / largest:.2f}", f"{rate:.2f}"
            )
        made.add_section()
    return made


if __name__ == "__main__":
    if AGENT_PID in os.environ:  # one of a job's ranks
        measure(Path(sys.argv[1]))
    else:
        sys.exit(main())
