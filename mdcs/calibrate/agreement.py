"""One profile and one plan for all ranks, and one error: what one raises alone, the others hear of and raise, too."""

from __future__ import annotations

import dataclasses
import pickle
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

from mdcs.profile.contents import Profile, Unit
from mdcs.profile.link import Link
from mdcs.runtime.errors import Place, RunError
from mdcs.runtime.last_words import LastWords

T = TypeVar("T")

_BAR = 20
"""Characters of a progress bar."""
_LISTEN = timedelta(seconds=0.5)
"""How often a rank that waits for the others asks whether one has left."""


class _Together:
    """The phase that all ranks are in, with a group of their own, so that nothing is left in the loop's if one leaves."""

    def __init__(self, tells: bool) -> None:
        self.doing, self._begin = "planning", time.monotonic()
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.tells, self._has_bar = tells and self.rank == 0, False
        self.group = dist.new_group(backend="gloo")
        run = [uuid.uuid4().hex]
        dist.broadcast_object_list(run, src=0, group=self.group)
        self.words = LastWords(Place(self.rank), run[0], world, lambda: f"while {self.doing}")

    def begin(self, what: str) -> None:
        self.doing = what
        if self.tells:
            self._end_bar()
            print(self._line(), file=sys.stderr, flush=True)

    def advance(self, part: float) -> None:
        if self.tells and sys.stderr.isatty():
            full = round(_BAR * part)
            self._has_bar = True
            print(f"\r{self._line()} [{'#' * full}{'.' * (_BAR - full)}]", end="", file=sys.stderr, flush=True)

    def _line(self) -> str:
        return f"mdcs: {self.doing} (after {time.monotonic() - self._begin:.0f} s)"

    def _end_bar(self) -> None:
        if self._has_bar:
            print(file=sys.stderr)
        self._has_bar = False

    def error(self, what: str) -> RunError:
        return RunError(f"rank {self.rank}, while {self.doing}: {what}")

    def end(self) -> None:
        self._end_bar()
        self.words.end()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


_together: _Together | None = None


@contextmanager
def together(*, tells: bool = False) -> Iterator[None]:
    """Ranks that measure and plan side by side: what one raises alone the others hear of within a second of waiting for it.

    They raise RunError with that rank's words. A rank that is killed is named. Collective: enter it on every rank; inside of
    another one it is that one. ``tells``: rank 0 writes a line to stderr for every phase (:func:`doing`), with
    a progress bar on a terminal.
    """
    global _together
    if _together is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    all_ranks = _together = _Together(tells)
    try:
        yield
    except RuntimeError as e:
        explained = str(e) if isinstance(e, RunError) else all_ranks.words.after(str(e))
        if explained != str(e):  # what came of another rank's leaving
            raise all_ranks.error(explained) from e
        all_ranks.words.say(e)
        raise
    except BaseException as e:
        all_ranks.words.say(e)
        raise
    finally:
        _together = None
        all_ranks.end()


def doing(what: str) -> None:
    """Name what all ranks do from now on, for the words of a rank that leaves: 'measuring the link', say."""
    if _together is not None:
        _together.begin(what)


def advance(part: float) -> None:
    """Draw a progress bar for the phase, of which this part (0 to 1) is over, on rank 0's terminal if it tells of phases."""
    if _together is not None:
        _together.advance(part)


def meet(group: dist.ProcessGroup | None = None) -> None:
    """A barrier; inside of :func:`together` it is one of all ranks, and raises RunError if another rank has left."""
    if group is not None or _together is None:
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.barrier(group=group)
        return
    work = dist.barrier(group=_together.group, async_op=True)
    assert work is not None
    while True:
        try:
            work.wait(_LISTEN)
            return
        except RuntimeError:
            if work.is_completed():  # the barrier has failed: it is not only late
                raise
        if heard := _together.words.heard():
            raise _together.error(heard)


def gathered(value: T) -> list[T]:
    """Every rank's value, by rank, as soon as the last is there; raises as :func:`meet` does."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        meet()
        dist.all_gather_object(values, value, group=None if _together is None else _together.group)
    return values


def agree(profile: Profile, link: Link | None = None) -> Profile:
    """One profile from those of all ranks: the median rank's times with the spread over all, the largest bytes, all uses.

    ``link`` takes the place of the profile's own. Collective: call it on every rank; without ranks the profile is its own.
    """
    profiles = gathered(profile)
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
        meet()  # rank 0 may be interrupted while it makes it
        dist.broadcast_object_list(box, src=0, group=None if _together is None else _together.group)
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
