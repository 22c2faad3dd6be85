"""Measure the link: every algorithm of every operation over a sweep of message sizes, on the process group itself.

Each is run as the runtime runs it (:mod:`mdcs.runtime.collectives`). The fastest of an operation is the one whose
median is smallest at the size nearest to a block; α and β are fitted to it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from mdcs.collectives import ALGORITHMS, KIND, OPERATION, Collectives
from mdcs.link import Kind, Link
from mdcs.runtime.collectives import Communicator, backend_of

SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # payload bytes
_REPEATS = 5
_SATURATED = 0.97
_BLOCKS = 1 << 18, 1 << 22  # the smallest and the largest


@dataclass(frozen=True)
class Timing:
    """Median seconds of one algorithm by payload bytes: ``seconds`` in all, ``link_s`` without the sum that follows."""

    operation: str
    algorithm: str
    seconds: dict[int, float]
    link_s: dict[int, float]


def measure_link(
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    depth: int = 2,
    wanted: Mapping[str, str] | None = None,
) -> tuple[Link, Collectives]:
    """The algorithm of each operation, and α–β of the link with them by least squares over four sizes.

    ``wanted`` names algorithms by operation; of the other operations all are measured and the fastest is taken (on a
    GPU over gloo: the default, as gloo sends little else from there). Collective: call it on every rank. A world of one
    has a link that takes no time. Raises ValueError for an algorithm that the backend does not have.
    """
    backend, wanted = backend_of(group), wanted or {}
    chosen = replace(Collectives.default(backend), **wanted)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    if world == 1:
        return Link((0.0,) * 4, (0.0,) * 4, depth), chosen
    only_default = backend == "gloo" and device.type != "cpu"
    candidates = {
        operation: (getattr(chosen, operation),) if only_default or operation in wanted else names
        for operation, names in ALGORITHMS[backend].items()
    }
    timings = measure_algorithms(device, candidates, SIZES, group=group)
    block = _link(timings, chosen, world, depth).block
    nearest = min(SIZES, key=lambda size: abs(math.log(size / block)))
    for operation in candidates:
        fastest = min((t for t in timings if t.operation == operation), key=lambda t: t.seconds[nearest])
        chosen = replace(chosen, **{operation: fastest.algorithm})
    return _link(timings, chosen, world, depth), chosen


def measure_algorithms(
    device: torch.device,
    candidates: Mapping[str, Sequence[str]],
    sizes: Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    repeats: int = _REPEATS,
) -> list[Timing]:
    """Times of the ``candidates`` (algorithms by operation), the same on all ranks: a message ends when it has on each.

    Algorithms take turns, so that what else the machine does falls on all of them alike.
    """
    pairs = [(operation, name) for operation, names in candidates.items() for name in names]
    seconds: dict[tuple[str, str], dict[int, float]] = {pair: {} for pair in pairs}
    link_s: dict[tuple[str, str], dict[int, float]] = {pair: {} for pair in pairs}
    for size in sizes:
        runs = [_run(operation, name, size, device, group) for operation, name in pairs]
        samples = torch.tensor(
            [[_time(run, device, group) for run in runs] for _ in range(1 + repeats)], dtype=torch.float64, device=device
        )[1:]
        dist.all_reduce(samples, op=dist.ReduceOp.MAX, group=group)
        for pair, column in zip(pairs, samples.transpose(0, 1).tolist(), strict=True):
            link_s[pair][size], seconds[pair][size] = map(statistics.median, zip(*column, strict=True))
    return [Timing(*pair, seconds[pair], link_s[pair]) for pair in pairs]


def _link(timings: list[Timing], collectives: Collectives, world: int, depth: int) -> Link:
    fits = {}
    for t in timings:
        kind = KIND[t.operation]
        if collectives.of(kind) == t.algorithm:
            fits[kind] = _fit([(collectives.sent(kind, size, world), s) for size, s in t.link_s.items()])
    alpha, beta = zip(*(fits[KIND[OPERATION[kind]]] for kind in Kind), strict=True)
    block = int(max(alpha) / max(beta) * _SATURATED / (1 - _SATURATED)) if max(beta) > 0 else 1 << 20
    return Link(alpha, beta, depth, min(max(block, _BLOCKS[0]), _BLOCKS[1]))


_Run = tuple[Callable[[], None], Callable[[], None]]  # the collective, and what follows it


def _run(operation: str, algorithm: str, size: int, device: torch.device, group: dist.ProcessGroup | None) -> _Run:
    collectives = replace(Collectives.default(backend_of(group)), **{operation: algorithm})
    communicator, kind = Communicator(collectives, group), KIND[operation]
    world = communicator.world
    elements = size // 4 // world * world
    buffer = torch.zeros(elements, device=device)
    received = torch.zeros(collectives.buffer(kind, elements, world), device=device)
    out = torch.zeros(elements // world, device=device)

    def collective() -> None:
        if kind is Kind.AR:
            communicator.all_reduce(buffer, received).wait()
        elif kind is Kind.RS:
            communicator.reduce_scatter(buffer, received, out).wait()
        else:
            communicator.all_gather(buffer).wait()

    def then() -> None:
        if algorithm == "all_to_all":
            torch.sum(received.view(world, -1), dim=0, out=out)

    return collective, then


def _time(run: _Run, device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Seconds until the collective is done, and until what follows it is."""
    collective, then = run
    dist.barrier(group=group)
    begin = time.perf_counter()
    collective()
    _sync(device)
    middle = time.perf_counter()
    then()
    _sync(device)
    return middle - begin, time.perf_counter() - begin


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(α, β) of seconds = α + β · bytes by least squares, neither negative."""
    xs, ys = [float(x) for x, _ in points], [y for _, y in points]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mx) ** 2 for x in xs)
    beta = max(0.0, sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / spread)
    return max(0.0, my - beta * mx), beta
