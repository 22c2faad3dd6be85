"""The LogGP model of the link: latency α, gap per message g and time per byte β of each kind.

The simulator replays this model in virtual time. For an emulated link, ``mdcs.emulation`` imposes the same model
on real collectives in wall-clock time, so the two cannot drift apart.

Messages start in FIFO order, at most ``depth`` in flight. Their latencies overlap, their bytes do not. The link serves
the bytes of one message after the other and pauses between two messages. Message i ends at

    max(start_i + α, end_{i-1} + g) + β · bytes_i

(Alexandrov et al., 1995: α is L + 2o, β is G). With ``depth`` 1 messages run one at a time, as on NCCL. On CPUs a
replay adds min(skew, start_i - end_{i-1}) to α: :class:`mdcs.profile.contention.Contention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mdcs.sizes import MIB


class Kind(str, Enum):
    """The collective kinds.

    - ``is_gather``: the kind gathers parameters.
    - ``in_node``: the shards belong to the ranks of one node.
    - ``plain``: the same kind over the world.
    """

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

        An all-reduce has two phases and pays the latency twice. Raises ValueError for a rate that is not positive, a
        latency below 0 and a depth below 1.
        """
        if not rate_gbit > 0:
            raise ValueError(f"rate_gbit must be > 0, got {rate_gbit}")
        if latency_us < 0:
            raise ValueError(f"latency_us must be >= 0, got {latency_us}")
        a, b = latency_us * 1e-6, 8 / (rate_gbit * 1e9)
        # 97 % of peak bandwidth: α <= 3 % of the total time, hence β·block = 0.97/0.03·α.
        block = max(MIB // 4, int(a / b * 0.97 / 0.03))
        return cls((2 * a, a, a, a), (b, b, b, b), depth, block, emulated)

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
        """Return the pause (seconds) before the bytes of a message of this kind, after the end of the previous message.
        """
        return self.gap[_ORDER[kind]]

    def end(self, kind: Kind, wire: int, start: float, previous_end: float) -> float:
        """Return when a message of ``wire`` bytes ends, in seconds.

        max(start + α, previous_end + gap) + β · wire. ``start``: when the message starts. ``previous_end``: when the
        previous message ends, -inf for the first message.
        """
        return max(start + self.alpha_of(kind), previous_end + self.gap_of(kind)) + self.beta_of(kind) * wire


_ORDER = {kind: i for i, kind in enumerate(Kind)}
