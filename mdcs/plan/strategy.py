"""The strategies of a unit, and the collectives that each needs in one period."""

from __future__ import annotations

from enum import Enum

from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind


class Strategy(str, Enum):
    """How one unit is sharded; docs/glossary.md says what each holds and when it frees it."""

    dp = "dp"  # replicated, all-reduce, full update
    zero1 = "zero1"  # parameters resident, reduce-scatter, shard update, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, freed, gathered again before backward
    hsdp = "hsdp"  # sdp within each node; all nodes have the same shards
    hfsdp = "hfsdp"  # fsdp within each node

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self.sharded = value.endswith("sdp")  # whether the parameters at rest are a shard
        self.in_node = value.startswith("h")  # whether shards are of the ranks of a node, not of the world
        self.regathers = value.endswith("fsdp")  # whether it is freed between forward and backward
        self._reduction, self._forward, self._backward = (
            (Kind.RS_N, Kind.AG_F_N, Kind.AG_B_N) if self.in_node else (Kind.RS, Kind.AG_F, Kind.AG_B)
        )

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """The collectives that a unit of this strategy needs in one period, those of its gradients first."""
        if not (trainable or self.sharded):
            return ()
        if self is Strategy.dp:
            return (Kind.AR,)
        update = (self._reduction,) if trainable else ()
        again = (self._backward,) if self.regathers and has_backward else ()
        return (*update, self._forward, *again)

    @property
    def kept(self) -> Strategy:
        """The strategy that does the same but for freeing a unit between forward and backward."""
        return Strategy(self.value.replace("fsdp", "sdp"))

    def parts(self, profile: Profile) -> int:
        """Into how many parts a unit's updates, and what is sharded of it, are divided among ranks."""
        return 1 if self is Strategy.dp else profile.per_node if self.in_node else profile.world


def choices(profile: Profile) -> list[Strategy]:
    """The strategies that there are for the ranks of a profile."""
    return [k for k in Strategy if profile.per_node or not k.in_node]
