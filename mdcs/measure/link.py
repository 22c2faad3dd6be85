"""Measure the link: α and β per collective kind, from a sweep of message sizes over the process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mdcs.link import Kind, Link, wire_bytes

_SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)  # payload bytes
_REPEATS = 5
_SATURATED = 0.97


def measure_link(device: torch.device, *, group: dist.ProcessGroup | None = None, depth: int = 2) -> Link:
    """α–β of all-reduce, reduce-scatter (all-to-all on gloo) and all-gather, least squares over four sizes.

    Collective: call it on every rank. A world of one has a link that takes no time.
    """
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    if world == 1:
        return Link((0.0,) * 4, (0.0,) * 4, depth)
    native = dist.get_backend(group) != "gloo"
    fits = {}
    for kind in (Kind.AR, Kind.RS, Kind.AG_F):
        points = []
        for size in _SIZES:
            seconds = _time(_collective(kind, size // 4 // world * world, device, group, native))
            wire = wire_bytes(kind, size, world, "native" if native else "all_to_all")
            points.append((wire, seconds))
        fits[kind] = _fit(points)
    table = [fits[Kind.AR], fits[Kind.RS], fits[Kind.AG_F], fits[Kind.AG_F]]
    agreed = torch.tensor(table, dtype=torch.float64, device=device)
    dist.broadcast(agreed, group_src=0, group=group)
    alpha, beta = zip(*agreed.tolist(), strict=True)
    block = int(max(alpha) / max(beta) * _SATURATED / (1 - _SATURATED)) if max(beta) > 0 else 1 << 20
    return Link(tuple(alpha), tuple(beta), depth, min(max(block, 1 << 18), 1 << 22))


def _collective(
    kind: Kind, elements: int, device: torch.device, group: dist.ProcessGroup | None, native: bool
) -> Callable[[], None]:
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    buffer = torch.ones(elements, device=device)
    out = torch.empty(elements if not native else elements // world, device=device)

    def run() -> None:
        if kind is Kind.AR:
            dist.all_reduce(buffer, group=group)
        elif kind is Kind.RS and native:
            dist.reduce_scatter_tensor(out, buffer, group=group)
        elif kind is Kind.RS:
            dist.all_to_all_single(out, buffer, group=group)
            torch.sum(out.view(world, -1), dim=0)
        elif native:
            dist.all_gather_into_tensor(buffer, buffer.chunk(world)[rank], group=group)
        else:
            works = [
                dist.broadcast(part, group_src=r, group=group, async_op=True)
                for r, part in enumerate(buffer.chunk(world))
            ]
            for work in works:
                assert work is not None
                work.wait()

    return run


def _time(run: Callable[[], None]) -> float:
    run()
    samples = []
    for _ in range(_REPEATS):
        _sync()
        begin = time.perf_counter()
        run()
        _sync()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _fit(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(α, β) of seconds = α + β · bytes by least squares, neither negative."""
    xs, ys = [float(x) for x, _ in points], [y for _, y in points]
    mx, my = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mx) ** 2 for x in xs)
    beta = max(0.0, sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / spread)
    return max(0.0, my - beta * mx), beta


