"""Algorithms of the collectives: the bytes that each sends and the buffers that each needs.

A message has S bytes (the whole, unsharded payload) on N ranks. *sent* counts the bytes of the rank that sends most:

| operation | algorithm | sent | buffer |
|---|---|---|---|
| all-reduce | native (the backend's own) | 2 S (N-1)/N | - |
| | ring: reduce-scatter and all-gather, each N-1 messages to the next rank | 2 S (N-1)/N | S/N |
| | direct: a direct reduce-scatter and all-gather | 2 S (N-1)/N | S (N-1)/N |
| | reduce_broadcast: to rank 0 along a binomial tree, and back | S ⌈log2 N⌉, by rank 0 | S |
| reduce-scatter | all_to_all, then each rank sums the parts that it received | S (N-1)/N | S |
| | native: gloo's is an all-reduce, here in place | 2 S (N-1)/N | - |
| | ring | S (N-1)/N | S/N |
| | direct: every rank to every other at once; each sums the parts that it received | S (N-1)/N | S (N-1)/N |
| all-gather | broadcast: one from every rank, in place | S (N-1)/N | - |
| | native: gloo's gathers into a copy | S (N-1)/N | S |
| | ring | S (N-1)/N | - |
| | direct: every rank to every other at once, in place | S (N-1)/N | - |

Within nodes of n of the N ranks, a unit is gathered among n ranks. A reduction has two parts: a reduction among n
ranks, then an all-reduce of the shard (S/n bytes) among the N/n ranks that hold the same shard. The algorithms are the
same.

NCCL has native algorithms only. They copy nothing, and the reduce-scatter sends S (N-1)/N. The numbers of gloo were
counted on the wire and with the memory meter (torch 2.13). Rings and trees: Thakur, Rabenseifner, Gropp, "Optimization
of Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from mdcs.profile.link import Kind

_Bytes = Callable[[int, int], int]  # (bytes of the message, ranks) -> bytes


def _none(size: int, world: int) -> int:
    return 0


def _part(size: int, world: int) -> int:
    return size // world


def _whole(size: int, world: int) -> int:
    return size


def _once(size: int, world: int) -> int:
    return size * (world - 1) // world


def _twice(size: int, world: int) -> int:
    return 2 * _once(size, world)


def _tree(size: int, world: int) -> int:
    return size * (world - 1).bit_length()


class _Algorithm(NamedTuple):
    sent: _Bytes
    buffer: _Bytes
    sums_afterwards: bool = False  # each rank sums the parts that it received, after the collective


_TABLES: dict[str, dict[str, dict[str, _Algorithm]]] = {  # backend, operation, algorithm
    "gloo": {
        "all_reduce": {
            "native": _Algorithm(_twice, _none),
            "ring": _Algorithm(_twice, _part),
            "direct": _Algorithm(_twice, _once),
            "reduce_broadcast": _Algorithm(_tree, _whole),
        },
        "reduce_scatter": {
            "all_to_all": _Algorithm(_once, _whole, sums_afterwards=True),
            "native": _Algorithm(_twice, _none),
            "ring": _Algorithm(_once, _part),
            "direct": _Algorithm(_once, _once),
        },
        "all_gather": {
            "broadcast": _Algorithm(_once, _none),
            "native": _Algorithm(_once, _whole),
            "ring": _Algorithm(_once, _none),
            "direct": _Algorithm(_once, _none),
        },
    },
    "nccl": {
        "all_reduce": {"native": _Algorithm(_twice, _none)},
        "reduce_scatter": {"native": _Algorithm(_once, _none)},
        "all_gather": {"native": _Algorithm(_once, _none)},
    },
}

ALGORITHMS = {backend: {op: tuple(names) for op, names in table.items()} for backend, table in _TABLES.items()}
"""Backend -> operation -> names of its algorithms."""

KIND = {"all_reduce": Kind.AR, "reduce_scatter": Kind.RS, "all_gather": Kind.AG_F}
"""Operation -> a kind that it carries (all-gather: AG_F)."""
OPERATION = {
    kind: "all_gather" if kind.is_gather else "all_reduce" if kind is Kind.AR else "reduce_scatter" for kind in Kind
}
"""Kind of message -> the operation that carries it. An all-reduce across nodes follows the reduce-scatter of RS_N."""


def name_of(kind: Kind) -> str:
    """Return the name of the operation that carries this kind, in words. Measurements are keyed by this name."""
    return f"{OPERATION[kind]} within nodes" if kind.in_node else OPERATION[kind]


@dataclass(frozen=True)
class Collectives:
    """The algorithm of each operation. Raises ValueError for an algorithm that the backend does not have.

    The defaults are for gloo without measurements. They send as few bytes as possible, and copy only where a sum needs
    a copy.
    """

    all_reduce: str = "native"
    reduce_scatter: str = "all_to_all"
    all_gather: str = "broadcast"
    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.backend not in ALGORITHMS:
            raise ValueError(f"collectives: backend must be {' or '.join(ALGORITHMS)}, got {self.backend!r}")
        for operation, names in ALGORITHMS[self.backend].items():
            name = getattr(self, operation)
            if name not in names:
                raise ValueError(f"collectives: {operation} must be {' or '.join(names)} on {self.backend}, got {name!r}")

    @classmethod
    def default(cls, backend: str) -> Collectives:
        """Return the algorithms for ``backend`` (gloo or nccl) that are best without measurements."""
        return cls() if backend == "gloo" else cls("native", "native", "native", backend)

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self) if f.name != "backend")

    def in_flight(self, depth: int | None) -> int | None:
        """Return how many messages of a group are on the link at once: 1 on NCCL, otherwise ``depth``."""
        return 1 if self.backend == "nccl" else depth

    def of(self, kind: Kind) -> str:
        """Return the name of the algorithm that carries messages of this kind."""
        algorithm: str = getattr(self, OPERATION[kind])
        return algorithm

    def sent(self, kind: Kind, size: int, world: int) -> int:
        """Return the bytes sent by the rank that sends most. ``size``: bytes of the whole payload."""
        return self._algorithms[kind].sent(size, world)

    def buffer(self, kind: Kind, size: int, world: int) -> int:
        """Return the bytes of the algorithm's own buffer on every rank, in addition to the message.

        The result is in elements if ``size`` is in elements. The backend allocates the buffer of a native algorithm in
        its own threads.
        """
        return self._algorithms[kind].buffer(size, world) if world > 1 else 0

    def sent_by_node(self, kind: Kind, size: int, per_node: int, nodes: int) -> int:
        """Return :meth:`sent` for a kind within nodes. RS_N sends within the node, then its shard across nodes."""
        inside = self.sent(kind.plain, size, per_node)
        return inside if kind.is_gather else inside + self.sent(Kind.AR, size // per_node, nodes)

    def buffer_by_node(self, kind: Kind, size: int, per_node: int, nodes: int) -> int:
        """Return :meth:`buffer` for a kind within nodes. The two collectives of RS_N run in turn and share one buffer.
        """
        inside = self.buffer(kind.plain, size, per_node)
        return inside if kind.is_gather else max(inside, self.buffer(Kind.AR, size // per_node, nodes))

    def sums_afterwards(self, kind: Kind) -> bool:
        """Whether each rank sums the received parts after the collective.

        False for RS_N: its sum is done inside the message, before the all-reduce across nodes.
        """
        return self._algorithms[kind].sums_afterwards and not kind.in_node

    @cached_property
    def _algorithms(self) -> dict[Kind, _Algorithm]:  # cached: planners look algorithms up very often
        return {kind: _TABLES[self.backend][operation][self.of(kind)] for kind, operation in OPERATION.items()}
