"""One profile and one plan for all ranks."""

from __future__ import annotations

import dataclasses
import pickle
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from mdcs.profile.contents import Profile
from mdcs.profile.link import Link

T = TypeVar("T")


def agree(profile: Profile, link: Link | None = None) -> Profile:
    """One profile from those of all ranks: the median rank's times with the spread over all, the largest bytes.

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
    return dataclasses.replace(first, slots=slots, link=link or first.link, spread=spread)


def on_rank_zero(make: Callable[[], T]) -> T:
    """What rank 0 makes, plans for instance, on every rank. Raises what ``make`` raises, on every rank, too.

    Collective: call it on every rank; ``make`` is called on rank 0 only. An error that cannot be sent is a RuntimeError of
    its text on the other ranks.
    """
    made: T | Exception | None = None
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
    assert made is not None
    return made


def _portable(error: Exception) -> Exception:
    """The error itself if pickle brings back one of the same text, else that text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may do anything when it is pickled or made again
        copy = None
    return error if type(copy) is type(error) and str(copy) == str(error) else RuntimeError(f"{type(error).__name__}: {error}")
