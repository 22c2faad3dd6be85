"""A stand-in for a model on a device that one does not have: real parameters, gradients and updates, and computing that only waits.

Its blocks are alike, or the units of a profile: one that was measured here or on a GPU, or calculated. What computes sleeps until
its time is over and leaves the cores to messages and updates, so that ranks on a few cores stand for as many devices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.tasks.inputs import Images
from experiments.tasks.model import Model
from mdcs.options import OptionError, option, options, shown
from mdcs.profile.contents import Profile
from mdcs.sizes import MIB

if TYPE_CHECKING:
    from experiments.tasks.task import Task

_BLOCK = ("layers", "block_mib", "forward_ms", "backward_ms", "activations_mib")
_FP32 = 4  # bytes, in which block_mib counts


@dataclass(frozen=True)
class Unit:
    """A name, how many elements, and whether they are trained."""

    name: str
    numel: int
    trainable: bool = True


@dataclass(frozen=True)
class Use:
    """One forward of a unit and its backward, in seconds and bytes.

    What forward keeps is held until the end of its backward; workspaces are held beside it while either runs. The `inner` uses
    begin after this one and run inside of its module: their backward comes after its own.
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
    """What is to be built: units, and their uses in the order of forward."""

    units: tuple[Unit, ...]
    uses: tuple[Use, ...]


@dataclass(frozen=True, kw_only=True)
class Timed(Model):
    """Blocks that wait. Raises OptionError for a profile that cannot be read or built, and for numbers of blocks beside one."""

    layers: int = option(12, "blocks", at_least=1)
    block_mib: float = option(5.722, "parameters of a block, in float32", above=0)
    forward_ms: float = option(32.0, "that the forward of a block takes", at_least=0)
    backward_ms: float = option(64.0, "that the backward of a block takes", at_least=0)
    activations_mib: float = option(0.0, "that a block keeps from forward to backward", at_least=0)
    profile: str | None = option(None, "a profile.json whose units and slots are stood in for, instead of blocks", profiled=False)
    divisor: float = option(1.0, "profile: its elements and activations are divided by it, as rates of links are to be", above=0)
    tensors: int = option(4, "parameters that a unit is made of, where it has so many elements", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profile is None:
            if self.divisor != 1:
                raise OptionError("divisor", f"has no effect without model.profile, got {shown(self.divisor)}")
            return
        for name in _BLOCK:
            if getattr(self, name) != options(self)[name].default:
                raise OptionError(name, f"has no effect with model.profile, got {shown(getattr(self, name))}")
        try:
            _ = self.shape
        except (OSError, ValueError, AttributeError) as error:
            raise OptionError("profile", f"{self.profile} is no profile to stand in for: {error}") from error

    @property
    def label(self) -> str:
        """It never passes for a model that computes."""
        return f"{self.name}, timed compute"

    @property
    def made_of(self) -> dict[str, str]:
        """That its compute is timed, and the profile's contents."""
        content = {} if self.profile is None else {"contents": hashlib.sha256(Path(self.profile).read_bytes()).hexdigest()[:16]}
        return {"compute": "timed", **content}

    @cached_property
    def shape(self) -> Shape:
        """Of the blocks, or of the profile."""
        if self.profile is not None:
            return stand_in(Profile.from_json(Path(self.profile).read_text(encoding="utf-8")), self.divisor)
        numel, kept = round(self.block_mib * MIB / _FP32), round(self.activations_mib * MIB)
        units = tuple(Unit(f"blocks.{i}", max(1, numel)) for i in range(self.layers))
        uses = tuple(Use(i, self.forward_ms * 1e-3, self.backward_ms * 1e-3, kept) for i in range(self.layers))
        return Shape(units, uses)

    @property
    def inputs(self) -> Images:
        """A number per use of a unit; labels are what their weighted sum is drawn to."""
        return Images(1, count(self.shape.uses), 2, flat=True)

    def make(self) -> Task:
        """Every unit is a block."""
        from experiments.tasks.task import Task
        from experiments.tasks.waiting import Waiting, squared_error

        return Task(Waiting(self.shape, self.tensors), squared_error, ("Block",), self.inputs)


def count(uses: Sequence[Use]) -> int:
    """Of the uses and those inside of them."""
    return sum(1 + count(use.inner) for use in uses)


def stand_in(profile: Profile, divisor: float = 1.0) -> Shape:
    """The units of a profile, and their uses with the seconds and the bytes of its slots; elements and bytes are divided.

    Raises ValueError for a profile whose backward is neither that of a chain nor that of nested modules.
    """
    forward, backward = profile.slots[: profile.forward_slots], profile.slots[profile.forward_slots :]
    live = [slot.live for slot in profile.slots[1:]]  # when a slot has ended
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
    """The units whose gradients come, of those that are `reached`, in the order in which autograd comes to them."""
    order = []
    for use in reversed(uses):
        order += [use.unit] if use.unit in reached else []
        order += backward_order(use.inner, reached)
    return order

