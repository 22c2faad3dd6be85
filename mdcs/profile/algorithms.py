"""Which algorithm carries each kind of message, the bytes that it sends, and the buffers that it needs.

For a message of S bytes (whole, unsharded) on N ranks; *sent* is what the rank that sends most sends:

| operation | algorithm | sent | buffer |
|---|---|---|---|
| all-reduce | native (the backend's own) | 2 S (N-1)/N | - |
| | ring: reduce-scatter and all-gather, each N-1 messages to the next rank | 2 S (N-1)/N | S/N |
| | direct: a direct reduce-scatter and all-gather | 2 S (N-1)/N | S (N-1)/N |
| | reduce_broadcast: to rank 0 along a binomial tree, and back | S ⌈log2 N⌉, by rank 0 | S |
| reduce-scatter | all_to_all, then each rank sums what it got | S (N-1)/N | S |
| | native: gloo's is an all-reduce, here in place | 2 S (N-1)/N | - |
| | ring | S (N-1)/N | S/N |
| | direct: from every rank to every other at once; each sums what it got | S (N-1)/N | S (N-1)/N |
| all-gather | broadcast: one from every rank, in place | S (N-1)/N | - |
| | native: gloo's gathers into a copy | S (N-1)/N | S |
| | ring | S (N-1)/N | - |
| | direct: from every rank to every other at once, in place | S (N-1)/N | - |

Sharded within nodes of n of the N ranks, a unit is gathered, and at first reduced, among n ranks; after a reduction an
all-reduce of the shard, S/n, follows among the N/n ranks that have the same one. The algorithms are the same.

NCCL has its native ones only: nothing is copied, and its reduce-scatter sends S (N-1)/N. gloo's were counted on the
wire and with the memory meter (torch 2.13). Rings and trees: Thakur, Rabenseifner, Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

from mdcs.profile.link import Kind

_Bytes = Callable[[int, int], int]  # of (bytes of the message, ranks)


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
    sums_afterwards: bool = False  # the rank itself, what the collective has brought


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
"""Operation -> a kind that it carries (all-gathers: AG_F)."""
OPERATION = {
    kind: "all_gather" if kind.is_gather else "all_reduce" if kind is Kind.AR else "reduce_scatter" for kind in Kind
}
"""Kind of message -> the operation that carries it; an all-reduce across nodes follows those of RS_N."""


def name_of(kind: Kind) -> str:
    """What carries messages of this kind, in words: the key of what was measured of it."""
    return f"{OPERATION[kind]} within nodes" if kind.in_node else OPERATION[kind]


@dataclass(frozen=True)
class Collectives:
    """The algorithm of each operation. Raises ValueError for one that the backend does not have.

    The defaults are what is best on gloo where nothing is measured: no more bytes than necessary, and no copies but the
    one that a sum needs.
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
        """The algorithms that are best on ``backend`` (gloo or nccl) where nothing is measured."""
        return cls() if backend == "gloo" else cls("native", "native", "native", backend)

    def __str__(self) -> str:
        return ", ".join(f"{f.name} {getattr(self, f.name)}" for f in fields(self) if f.name != "backend")

    def in_flight(self, depth: int | None) -> int | None:
        """How many messages of a group the backend has on the link at once where ``depth`` would be there: NCCL sends one."""
        return 1 if self.backend == "nccl" else depth

    def of(self, kind: Kind) -> str:
        """The name of the algorithm that carries messages of this kind."""
        algorithm: str = getattr(self, OPERATION[kind])
        return algorithm

    def sent(self, kind: Kind, size: int, world: int) -> int:
        """Bytes that the rank that sends most sends for a message whose whole payload is ``size`` bytes."""
        return self._algorithms[kind].sent(size, world)

    def buffer(self, kind: Kind, size: int, world: int) -> int:
        """Bytes (or elements, for a ``size`` in elements) that the algorithm needs beside the message, on every rank.

        The backend allocates those of a native algorithm, in its own threads.
        """
        return self._algorithms[kind].buffer(size, world) if world > 1 else 0

    def sent_by_node(self, kind: Kind, size: int, per_node: int, nodes: int) -> int:
        """:meth:`sent` of a kind within nodes: of RS_N in the node, and then of its shard across."""
        inside = self.sent(kind.plain, size, per_node)
        return inside if kind.is_gather else inside + self.sent(Kind.AR, size // per_node, nodes)

    def buffer_by_node(self, kind: Kind, size: int, per_node: int, nodes: int) -> int:
        """:meth:`buffer` of a kind within nodes: of RS_N one for both of its collectives, which follow each other."""
        inside = self.buffer(kind.plain, size, per_node)
        return inside if kind.is_gather else max(inside, self.buffer(Kind.AR, size // per_node, nodes))

    def sums_afterwards(self, kind: Kind) -> bool:
        """Whether each rank sums what the collective has brought, once it is done; within RS_N it is done before it goes on."""
        return self._algorithms[kind].sums_afterwards and not kind.in_node

    @cached_property
    def _algorithms(self) -> dict[Kind, _Algorithm]:  # planners look it up all the time
        return {kind: _TABLES[self.backend][operation][self.of(kind)] for kind, operation in OPERATION.items()}
