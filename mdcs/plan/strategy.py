"""The strategies of a unit, and the collectives that each needs in one period."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile


class Sharding(NamedTuple):
    """Properties of a strategy.

    - ``sharded``: the parameters at rest are a shard. They are gathered before forward.
    - ``regathers``: the unit is resharded after forward and gathered again for backward.
    - ``sharded_update``: gradients are reduce-scattered. A rank holds the optimizer state of its shard, and updates it.
    - ``in_node``: the ranks of a node share the unit, and every node has all its shards. Else the world shares it.
    """

    sharded: bool
    regathers: bool
    sharded_update: bool
    in_node: bool


_SHARDING = {
    # name: sharded, regathers, sharded_update, in_node
    "dp": Sharding(False, False, False, False),
    "zero2": Sharding(False, False, True, False),
    "sdp": Sharding(True, False, True, False),
    "fsdp": Sharding(True, True, True, False),
    "hsdp_no_reshard": Sharding(True, False, True, True),
    "hsdp": Sharding(True, True, True, True),
}


class Strategy(str, Enum):
    """Sharding of one unit. docs/concepts.md has the bytes that each strategy holds and sends."""

    dp = "dp"  # replicated: all-reduce, full update
    zero2 = "zero2"  # whole parameters; reduce-scatter, update of a shard, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, resharded, gathered again before backward
    hsdp_no_reshard = "hsdp_no_reshard"  # sdp within each node; all nodes have the same shards
    hsdp = "hsdp"  # fsdp within each node

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self._sharding = _SHARDING[value]
        self.sharded, self.regathers, self.sharded_update, self.in_node = self._sharding
        self._reduction, self._forward, self._backward = (
            (Kind.RS_N, Kind.AG_F_N, Kind.AG_B_N) if self.in_node else (Kind.RS, Kind.AG_F, Kind.AG_B)
        )

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """Return the collectives that a unit needs in one period. The reduction comes first."""
        if not (trainable or self.sharded):
            return ()
        if not self.sharded_update:
            return (Kind.AR,)
        update = (self._reduction,) if trainable else ()
        again = (self._backward,) if self.regathers and has_backward else ()
        return (*update, self._forward, *again)

    @property
    def without_reshard(self) -> Strategy:
        """The same strategy, but without freeing the unit between forward and backward."""
        return next(k for k in Strategy if k._sharding == self._sharding._replace(regathers=False))

    def parts(self, profile: Profile) -> int:
        """Return the number of ranks that share a unit's update and its shards."""
        return 1 if not self.sharded_update else profile.per_node if self.in_node else profile.world


def choices(profile: Profile) -> list[Strategy]:
    """Return the strategies that are possible on the ranks of a profile."""
    return [k for k in Strategy if profile.per_node or not k.in_node]
