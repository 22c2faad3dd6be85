"""One profile and one plan for all ranks."""

from __future__ import annotations

import dataclasses
import pickle
import statistics
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mdcs.profile.contents import Profile, Unit
from mdcs.profile.link import Link

T = TypeVar("T")


def agree(profile: Profile, link: Link | None = None) -> Profile:
    """One profile from those of all ranks: the median rank's times with the spread over all, the largest bytes, all uses.

    ``link`` takes the place of the profile's own. Collective: call it on every rank; without ranks the profile is its own.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    profiles: list[Any] = [profile]
    if world > 1:
        profiles = [None] * world
        dist.all_gather_object(profiles, profile)
    slots = tuple(
        dataclasses.replace(
            versions[0],
            seconds=statistics.median(s.seconds for s in versions),
            live=max(s.live for s in versions),
            peak=max(s.peak for s in versions),
        )
        for versions in zip(*(p.slots for p in profiles), strict=True)
    )
    first: Profile = profiles[0]
    spread = {
        name: (min(p.spread[name][0] for p in profiles), max(p.spread[name][1] for p in profiles)) for name in first.spread
    }
    units = tuple(_joined(versions) for versions in zip(*(p.units for p in profiles), strict=True))
    return dataclasses.replace(first, units=units, slots=slots, link=link or first.link, spread=spread)


def _joined(versions: Sequence[Unit]) -> Unit:
    """The unit as the first rank has it, in use from the first slot to the last in which it is so on any rank."""
    first = versions[0]
    backward = [u.backward for u in versions if u.backward is not None]
    return dataclasses.replace(
        first,
        forward=_span([u.forward for u in versions]),
        backward=_span(backward) if backward else None,
        gradients=first.gradients if all(u.gradients and u.backward == first.backward for u in versions) else (),
        aliased=any(u.aliased for u in versions),
    )


def _span(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def on_rank_zero(make: Callable[[], T]) -> T:
    """What rank 0 makes, plans for instance, on every rank. Raises what ``make`` raises, on every rank, too.

    Collective: call it on every rank; ``make`` is called on rank 0 only. An error that cannot be sent is a RuntimeError of
    its text on the other ranks.
    """
    made: Any = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made = make()
        except Exception as e:  # whatever it is, the others wait for it
            made = e
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [_portable(made) if isinstance(made, Exception) else made]
        dist.broadcast_object_list(box, src=0)
        made = box[0] if made is None else made
    if isinstance(made, Exception):
        raise made
    return cast(T, made)


def _portable(error: Exception) -> Exception:
    """The error itself if pickle brings back one of the same text, else that text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may do anything when it is pickled or made again
        copy = None
    return error if type(copy) is type(error) and str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")
