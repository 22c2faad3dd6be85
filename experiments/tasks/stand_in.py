"""The shape of a stand-in: units and their uses with seconds and bytes. Also derives the shape from a profile.

Imports no torch: checks of a config use this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mdcs.profile.schema import Profile


@dataclass(frozen=True)
class Unit:
    """Name, number of elements, and whether they are trained."""

    name: str
    numel: int
    trainable: bool = True


@dataclass(frozen=True)
class Use:
    """One forward of a unit and its backward.

    - unit: index of the unit.
    - forward_s, backward_s (s): time of each.
    - kept (bytes): activations held from forward to the end of backward.
    - forward_workspace, backward_workspace (bytes): held in addition while forward or backward runs.
    - inner: uses that begin after this one and run inside its module. Their backward comes after the backward of this
      use.
    """

    unit: int
    forward_s: float
    backward_s: float
    kept: int = 0
    forward_workspace: int = 0
    backward_workspace: int = 0
    inner: tuple[Use, ...] = ()


@dataclass(frozen=True)
class Shape:
    """The units of a stand-in, and their uses in the order of forward."""

    units: tuple[Unit, ...]
    uses: tuple[Use, ...]


def count(uses: Sequence[Use]) -> int:
    """Number of uses, including inner ones."""
    return sum(1 + count(use.inner) for use in uses)


def of_profile(profile: Profile, divisor: float = 1.0) -> Shape:
    """The units of a profile, and their uses with the seconds and bytes of its slots.

    Numbers of elements and bytes are divided by `divisor`. Raises ValueError for a profile whose backward has neither
    the order of a chain nor that of nested modules.
    """
    forward, backward = profile.slots[: profile.forward_slots], profile.slots[profile.forward_slots :]
    live = [slot.live for slot in profile.slots[1:]]  # live[i]: after slot i has ended
    matched: dict[int, int] = {}  # forward slot -> its backward slot: the last use of a unit has the first
    for unit in range(len(profile.units)):
        last_first = [i for i, slot in reversed(list(enumerate(forward))) if slot.unit == unit]
        matched |= dict(zip(last_first, (i for i, slot in enumerate(backward) if slot.unit == unit), strict=False))

    def use(i: int, inner: tuple[Use, ...]) -> Use:
        slot, kept = forward[i], max(0, live[i] - forward[i].live)
        if i not in matched:
            return Use(slot.unit, slot.seconds, 0.0, round(kept / divisor), inner=inner)
        back = backward[matched[i]]
        return Use(
            slot.unit, slot.seconds, back.seconds, round(kept / divisor),
            round(max(0, slot.peak - slot.live - kept) / divisor), round(max(0, back.peak - back.live) / divisor), inner,
        )  # fmt: skip

    def nested(begin: int, end: int) -> tuple[Use, ...]:
        uses = []
        while begin < end:
            stop = begin + 1
            while stop < end and begin in matched and matched.get(stop, -1) > matched[begin]:
                stop += 1
            uses.append(use(begin, nested(begin + 1, stop)))
            begin = stop
        return tuple(uses)

    uses = nested(0, len(forward))
    wanted = [slot.unit for slot in backward]
    if backward_order(uses, {unit for i, unit in enumerate(slot.unit for slot in forward) if i in matched}) != wanted:
        raise ValueError("its backward slots are neither in the reverse order of forward nor those of nested modules")
    units = (Unit(u.name, max(1, round(u.numel / divisor)), u.trainable) for u in profile.units)
    return Shape(tuple(units), uses)


def backward_order(uses: Sequence[Use], reached: set[int]) -> list[int]:
    """The `reached` units in the order in which autograd reaches them."""
    order = []
    for use in reversed(uses):
        order += [use.unit] if use.unit in reached else []
        order += backward_order(use.inner, reached)
    return order
