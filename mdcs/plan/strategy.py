"""The strategies of a unit, and the collectives that each needs in one period."""

from __future__ import annotations

from enum import Enum

from mdcs.profile.link import Kind


class Strategy(str, Enum):
    """How one unit is sharded; docs/glossary.md says what each holds and when it frees it."""

    dp = "dp"  # replicated, all-reduce, full update
    zero1 = "zero1"  # parameters resident, reduce-scatter, shard update, all-gather
    sdp = "sdp"  # sharded at rest, gathered before forward, kept until its backward ends
    fsdp = "fsdp"  # gathered before forward, freed, gathered again before backward

    __hash__ = str.__hash__

    def __init__(self, value: str) -> None:
        self.sharded = value in ("sdp", "fsdp")  # whether the parameters at rest are a shard
        self._updating = {"dp": (Kind.AR,), "zero1": (Kind.RS, Kind.AG_F)}.get(value, (Kind.RS,))

    def __str__(self) -> str:
        return self.value

    def kinds(self, trainable: bool, has_backward: bool) -> tuple[Kind, ...]:
        """The collectives that a unit of this strategy needs in one period, those of its gradients first."""
        update = self._updating if trainable else ()
        if not self.sharded:
            return update
        again = (Kind.AG_B,) if self is Strategy.fsdp and has_backward else ()
        return (*update, Kind.AG_F, *again)
