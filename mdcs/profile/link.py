"""Communication: the kinds of messages, the link that carries them, the algorithms of collectives, and what messages
cost where they run.

**The link** is the LogGP model: latency α, gap per message g and time per byte β of each kind. The simulator replays
this model in virtual time. For an emulated link, ``mdcs.emulation`` imposes the same model on real collectives in
wall-clock time, so the two cannot drift apart. Messages start in FIFO order, at most ``depth`` in flight. Their
latencies overlap, their bytes do not. The link serves the bytes of one message after the other and pauses between two
messages. Message i ends at

    max(start_i + α, end_{i-1} + g) + β · bytes_i

(Alexandrov et al., 1995: α is L + 2o, β is G). With ``depth`` 1 messages run one at a time, as on NCCL. On CPUs a
replay adds min(skew, start_i - end_{i-1}) to α: :class:`Contention`.

**The algorithms** are of two families. A message has S bytes (the whole, unsharded payload) on N ranks. *sent* counts
the bytes of the rank that sends most:

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

import dataclasses
from dataclasses import dataclass
from enum import Enum

from mdcs.sizes import MIB


class Kind(str, Enum):
    """The collectives. ``is_gather``: of parameters. ``in_node``: among a node's ranks. ``plain``: over the world."""

    AR = "AR"  # all-reduce (dp)
    RS = "RS"  # reduce-scatter (zero2, sdp, fsdp)
    AG_F = "AG_F"  # all-gather before forward (zero2, sdp, fsdp)
    AG_B = "AG_B"  # all-gather before backward (fsdp)
    RS_N = "RS_N"  # reduce-scatter within the node, then all-reduce of the shard across nodes (hsdp, hsdp_no_reshard)
    AG_F_N = "AG_F_N"  # all-gather within the node before forward (hsdp, hsdp_no_reshard)
    AG_B_N = "AG_B_N"  # all-gather within the node before backward (hsdp)

    __hash__ = str.__hash__  # ten times faster than Enum's own; planners look kinds up very often
    plain: Kind

    def __init__(self, value: str) -> None:
        self.is_gather, self.in_node = value.startswith("AG"), value.endswith("_N")

    def __str__(self) -> str:
        return self.value


for _kind in Kind:
    _kind.plain = Kind(_kind.value.removesuffix("_N"))

REDUCTION = {Kind.AG_F: Kind.RS, Kind.AG_F_N: Kind.RS_N}
"""Gather before forward -> the reduction whose update it distributes."""
GATHER = {reduction: gather for gather, reduction in REDUCTION.items()}
"""Reduction -> the gather that distributes its update."""

_LEVELS = tuple(kind for kind in Kind if not kind.in_node), tuple(Kind)


@dataclass(frozen=True)
class Link:
    """Latency, bandwidth and gap of each kind, and the number of messages in flight.

    - ``alpha`` (s): latency of a message that is alone on the link.
    - ``beta`` (s/byte): seconds per wire byte.
    - ``depth``: messages in flight.
    - ``block``: the smallest message (payload bytes) that saturates the link; of a measured link at least 1 MiB. It is
      the partition size and the schedule granularity.
    - ``emulated``: messages are held back until the modelled link would have carried them.
    - ``gap`` (s): pause between two messages in flight.
    - ``per_node``: consecutive ranks that share a host, if the link has two levels (several hosts with several ranks
      each). Otherwise 0.

    ``alpha``, ``beta`` and ``gap`` follow the order of :class:`Kind`: AR, RS, AG_F, AG_B, and with two levels the kinds
    within nodes. Raises ValueError for a value out of range.
    """

    alpha: tuple[float, ...]
    beta: tuple[float, ...]
    depth: int = 2
    block: int = MIB
    emulated: bool = False
    gap: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    per_node: int = 0

    def __post_init__(self) -> None:
        if not len(self.alpha) == len(self.beta) == len(self.gap) == len(self.kinds):
            raise ValueError("link alpha, beta and gap must be of 4 kinds each, or of 7 with per_node ranks to a node")
        if min(*self.alpha, *self.beta, *self.gap) < 0:
            raise ValueError("link alpha, beta and gap must be >= 0")
        if self.depth < 1:
            raise ValueError(f"link depth must be >= 1, got {self.depth}")
        if self.block < 1:
            raise ValueError(f"link block must be >= 1 byte, got {self.block}")

    @classmethod
    def uniform(cls, rate_gbit: float, latency_us: float, depth: int = 2, emulated: bool = False) -> Link:
        """Return a link with one rate (10⁹ bits per second) and one latency (microseconds) for all kinds, without gaps.
        Raises ValueError for a rate that is not positive, a latency below 0 and a depth below 1.
        """
        if not rate_gbit > 0:
            raise ValueError(f"rate_gbit must be > 0, got {rate_gbit}")
        if latency_us < 0:
            raise ValueError(f"latency_us must be >= 0, got {latency_us}")
        a, b = latency_us * 1e-6, 8 / (rate_gbit * 1e9)
        # 97 % of peak bandwidth: α <= 3 % of the total time, hence β·block = 0.97/0.03·α.
        block = max(MIB // 4, int(a / b * 0.97 / 0.03))
        return cls((2 * a, a, a, a), (b, b, b, b), depth, block, emulated)  # an all-reduce has two phases

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds that the link has costs for. With two levels they include the kinds within nodes."""
        return _LEVELS[self.per_node > 0]

    def alpha_of(self, kind: Kind) -> float:
        """Return the latency (seconds) of a message of this kind that is alone on the link."""
        return self.alpha[_ORDER[kind]]

    def beta_of(self, kind: Kind) -> float:
        """Return the seconds per byte that the rank sends, for messages of this kind."""
        return self.beta[_ORDER[kind]]

    def gap_of(self, kind: Kind) -> float:
        """Return the pause (seconds) before the bytes of a message of this kind, after the end of the previous one."""
        return self.gap[_ORDER[kind]]

    def end(self, kind: Kind, wire: int, start: float, previous_end: float) -> float:
        """Return when a message of ``wire`` bytes ends (seconds). ``previous_end``: of the one before; -inf: none."""
        return max(start + self.alpha_of(kind), previous_end + self.gap_of(kind)) + self.beta_of(kind) * wire


_ORDER = {kind: i for i, kind in enumerate(Kind)}


# ---- collectives

ALGORITHMS = {"gloo": ("native", "ring"), "nccl": ("native",)}
"""Backend -> names of its families."""

OPERATION = {
    kind: "all_gather" if kind.is_gather else "all_reduce" if kind is Kind.AR else "reduce_scatter" for kind in Kind
}
"""Kind of message -> the operation that carries it. An all-reduce across nodes follows the reduce-scatter of RS_N."""


def operation_name(kind: Kind) -> str:
    """Return the name of the operation that carries this kind, in words. Measurements are keyed by this name."""
    return f"{OPERATION[kind]} within nodes" if kind.in_node else OPERATION[kind]


@dataclass(frozen=True)
class Collectives:
    """The family of algorithms that carries all messages, and the backend. By default gloo's rings, which send as few
    bytes as possible and need the least memory. Raises ValueError for a family that the backend does not have.
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
        """Return the bytes that a rank sends at most. ``size``: of the whole payload. ``per_node``: ranks of a node."""
        if kind.in_node:  # RS_N sends within the node, then its shard across
            inside = self.sent(kind.plain, size, per_node)
            return inside if kind.is_gather else inside + self.sent(Kind.AR, size // per_node, world // per_node)
        once = size * (world - 1) // world
        is_all_reduce = kind is Kind.AR or (kind is Kind.RS and (self.algorithm, self.backend) == ("native", "gloo"))
        return 2 * once if is_all_reduce else once

    def buffer(self, kind: Kind, size: int, world: int, per_node: int = 0) -> int:
        """Return the bytes of the algorithm's own buffer on every rank, beside the message; elements if ``size`` is.
        A native algorithm's is allocated in the backend's threads.
        """
        if kind.in_node:  # the two collectives of RS_N share one buffer
            inside = self.buffer(kind.plain, size, per_node)
            return inside if kind.is_gather else max(inside, self.buffer(Kind.AR, size // per_node, world // per_node))
        if world == 1 or self.backend == "nccl":
            return 0
        if self.algorithm == "native":
            return size if kind.is_gather else 0
        return 0 if kind.is_gather else size // world


# ---- what messages cost where they run


@dataclass(frozen=True)
class Contention:
    """The cost of communication where compute, copies and the runtime share the same cores: of the CPU backend only.

    All values are 0 on a GPU. :func:`mdcs.profiler.cost_fit.fit_costs` fits them. Raises ValueError for a negative
    number.

    - ``compute_per_message`` (s): compute time lost per message beside it; ``compute_per_byte``
      (s/byte): per byte that it sends; ``compute_per_work``: per second of copying, summing and updating.
    - ``message_seconds`` (s), ``seconds_per_byte`` (s/byte): lower bound on link occupancy while computing. The link's
      gap and β are measured while nothing computes. The longer of the two counts, never their sum.
    - ``skew_seconds`` (s): wait of a message that finds the link idle, for the rank that comes last, but no longer than
      the link was idle: the message before has brought the ranks together.
    - ``dispatch_seconds`` (s): delay between the end of a message and the start of the compute that waits for it.
    - ``turn_seconds`` (s): time of the training loop between backward and the next forward.
    """

    compute_per_message: float = 0.0
    compute_per_byte: float = 0.0
    compute_per_work: float = 0.0
    message_seconds: float = 0.0
    seconds_per_byte: float = 0.0
    skew_seconds: float = 0.0
    dispatch_seconds: float = 0.0
    turn_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 0:
                raise ValueError(f"contention {name} must be >= 0, got {value}")


UPDATES = ("cores", "link", "stream")


@dataclass(frozen=True)
class ExecutionModel:
    """Resources and waits of a message after its bytes have come. ``updates`` says where unpacking and updates run.

    - ``cores``: on threads that serve one message after the other, while the link carries up to ``Link.depth`` messages
      (gloo on CPU).
    - ``link``: on the stream of the collectives. The next message starts when the update is done.
    - ``stream``: updates on a stream of their own. The next message starts when this one is unpacked, and while at most
      one update of the messages before is not done (:mod:`mdcs.runtime.stream_transport`).

    A host that enqueues ahead of its device takes ``host_seconds_per_message`` and ``host_seconds_per_slot`` for each,
    before it can start; with each step it begins where the device is, as in a loop that reads its loss. 0 where the
    host's time is part of what was measured. Raises ValueError for another value and for negative seconds.
    """

    updates: str = "cores"
    host_seconds_per_message: float = 0.0
    host_seconds_per_slot: float = 0.0

    def __post_init__(self) -> None:
        if self.updates not in UPDATES:
            raise ValueError(f"execution updates must be one of {', '.join(UPDATES)}, got {self.updates!r}")
        if min(self.host_seconds_per_message, self.host_seconds_per_slot) < 0:
            raise ValueError("execution host seconds must be >= 0")

    @property
    def has_own_updates(self) -> bool:
        """Return whether updates run beside the link, which then carries one message at a time."""
        return self.updates == "stream"

    def in_flight(self, link_depth: int) -> int:
        """Return the messages from their start until they are done, on a link that carries ``link_depth`` at a time."""
        return {"cores": link_depth, "link": 1, "stream": 2}[self.updates]
