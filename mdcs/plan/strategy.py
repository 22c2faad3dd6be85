"""The strategies of a unit, and the collectives that each needs in one period."""

from __future__ import annotations

from enum import Enum

from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind


class Strategy(str, Enum):
    """How one unit is sharded. docs/glossary.md lists the bytes that each strategy holds and when they are freed."""

    dp = "dp"  # replicated, all-reduce, full update
    zero1 = "zero1"  # parameters resident, reduce-scatter, shard update, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, freed, gathered again before backward
    hsdp = "hsdp"  # sdp within each node; all nodes have the same shards
    hfsdp = "hfsdp"  # fsdp within each node

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self.sharded = value.endswith("sdp")  # whether the parameters at rest are a shard
        self.in_node = value.startswith("h")  # whether the ranks of a node, not of the world, share a unit
        self.regathers = value.endswith("fsdp")  # whether the unit is freed between forward and backward
        self._reduction, self._forward, self._backward = (
            (Kind.RS_N, Kind.AG_F_N, Kind.AG_B_N) if self.in_node else (Kind.RS, Kind.AG_F, Kind.AG_B)
        )

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """Return the collectives that a unit needs in one period. The reduction comes first."""
        if not (trainable or self.sharded):
            return ()
        if self is Strategy.dp:
            return (Kind.AR,)
        update = (self._reduction,) if trainable else ()
        again = (self._backward,) if self.regathers and has_backward else ()
        return (*update, self._forward, *again)

    @property
    def kept(self) -> Strategy:
        """The same strategy, but without freeing the unit between forward and backward."""
        return Strategy(self.value.replace("fsdp", "sdp"))

    def parts(self, profile: Profile) -> int:
        """Return the number of ranks that share a unit's update and its shards."""
        return 1 if self is Strategy.dp else profile.per_node if self.in_node else profile.world


def choices(profile: Profile) -> list[Strategy]:
    """Return the strategies that are possible on the ranks of a profile."""
    return [k for k in Strategy if profile.per_node or not k.in_node]
