"""The two families of collective algorithms: the bytes that each sends and the buffers that each needs.

A message has S bytes (the whole, unsharded payload) on N ranks. *sent* counts the bytes of the rank that sends most:

| operation | family | sent | buffer |
|---|---|---|---|
| all-reduce | native: the backend's own | 2 S (N-1)/N | - |
| | ring: reduce-scatter and all-gather, each N-1 messages to the next rank | 2 S (N-1)/N | S/N |
| reduce-scatter | native: gloo's is an all-reduce, here in place | 2 S (N-1)/N | - |
| | ring | S (N-1)/N | S/N |
| all-gather | native: gloo's gathers into a copy | S (N-1)/N | S |
| | ring: in place | S (N-1)/N | - |

One family carries all operations of a job: families that share a link slow each other down by 10 to 25 %
(docs/dev/lab-notes.md). Within nodes of n of the N ranks, a unit is gathered among n ranks. A reduction has two parts:
a reduction among n ranks, then an all-reduce of the shard (S/n bytes) among the N/n ranks that hold the same shard.

On two ranks both families sum two numbers, so their results are bitwise equal to DDP's.

NCCL has the native family only. It copies nothing, and its reduce-scatter sends S (N-1)/N. The numbers of gloo were
counted on the wire and with the memory meter (torch 2.13). Rings: Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH" (2005).
"""

from __future__ import annotations

from dataclasses import dataclass

from mdcs.profile.link import Kind

ALGORITHMS = {"gloo": ("native", "ring"), "nccl": ("native",)}
"""Backend -> names of its families."""

KIND = {"all_reduce": Kind.AR, "reduce_scatter": Kind.RS, "all_gather": Kind.AG_F}
"""Operation -> a kind that it carries (all-gather: AG_F)."""
OPERATION = {
    kind: "all_gather" if kind.is_gather else "all_reduce" if kind is Kind.AR else "reduce_scatter" for kind in Kind
}
"""Kind of message -> the operation that carries it. An all-reduce across nodes follows the reduce-scatter of RS_N."""


def operation_name(kind: Kind) -> str:
    """Return the name of the operation that carries this kind, in words. Measurements are keyed by this name."""
    return f"{OPERATION[kind]} within nodes" if kind.in_node else OPERATION[kind]


@dataclass(frozen=True)
class Collectives:
    """The family of algorithms that carries all messages, and the backend.

    The default is for gloo without measurements: rings send as few bytes as possible and need the least memory. Raises
    ValueError for a family that the backend does not have.
    """

    algorithm: str = "ring"
    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.backend not in ALGORITHMS:
            raise ValueError(f"collectives: backend must be {' or '.join(ALGORITHMS)}, got {self.backend!r}")
        names = ALGORITHMS[self.backend]
        if self.algorithm not in names:
            raise ValueError(
                f"collectives: algorithm must be {' or '.join(names)} on {self.backend}, got {self.algorithm!r}"
            )

    @classmethod
    def default(cls, backend: str) -> Collectives:
        """Return the family for ``backend`` (gloo or nccl) that is best without measurements."""
        return cls() if backend == "gloo" else cls("native", backend)

    def __str__(self) -> str:
        return self.algorithm

    def in_flight(self, depth: int | None) -> int | None:
        """Return how many messages of a group are on the link at once: 1 on NCCL, otherwise ``depth``."""
        return 1 if self.backend == "nccl" else depth

    def sent(self, kind: Kind, size: int, world: int, per_node: int = 0) -> int:
        """Return the bytes sent by the rank that sends most. ``size``: bytes of the whole payload.

        ``per_node``: ranks of a node, for the kinds within nodes. RS_N sends within the node, then its shard across.
        """
        if kind.in_node:
            inside = self.sent(kind.plain, size, per_node)
            return inside if kind.is_gather else inside + self.sent(Kind.AR, size // per_node, world // per_node)
        once = size * (world - 1) // world
        is_all_reduce = kind is Kind.AR or (kind is Kind.RS and (self.algorithm, self.backend) == ("native", "gloo"))
        return 2 * once if is_all_reduce else once

    def buffer(self, kind: Kind, size: int, world: int, per_node: int = 0) -> int:
        """Return the bytes of the algorithm's own buffer on every rank, in addition to the message.

        The result is in elements if ``size`` is in elements. The backend allocates the buffer of a native algorithm in
        its own threads. The two collectives of RS_N run in turn and share one buffer.
        """
        if kind.in_node:
            inside = self.buffer(kind.plain, size, per_node)
            return inside if kind.is_gather else max(inside, self.buffer(Kind.AR, size // per_node, world // per_node))
        if world == 1 or self.backend == "nccl":
            return 0
        if self.algorithm == "native":
            return size if kind.is_gather else 0
        return 0 if kind.is_gather else size // world
