"""One profile, one plan and one error for all ranks: an error on one rank is raised on the others, too."""

from __future__ import annotations

import dataclasses
import pickle
import statistics
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from threading import Thread
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from mdcs.profile.layout import WholeParameter
from mdcs.profile.recompute import RecomputeOption, RecomputeUse
from mdcs.profile.schema import Profile, Unit
from mdcs.profiler.batch_mix import uses
from mdcs.profiler.progress import Progress
from mdcs.runtime.errors import ErrorContext, FailureChannel, RunError

T = TypeVar("T")

_POLL_INTERVAL = timedelta(seconds=0.5)
"""Time between a waiting rank's checks whether another rank has left."""


class _AllRanks:
    """The current phase of all ranks, with a group of their own: a failed rank leaves nothing in the loop's group."""

    def __init__(self, tells: bool) -> None:
        self.doing = "planning"
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.progress = Progress(tells and self.rank == 0)
        self.group = dist.new_group(backend="gloo")
        run = [uuid.uuid4().hex]
        dist.broadcast_object_list(run, src=0, group=self.group)
        self.words = FailureChannel(ErrorContext(self.rank), run[0], world, lambda: f"while {self.doing}")

    def begin(self, what: str, seconds: float | None) -> None:
        self.doing = what
        self.progress.begin(what, seconds)

    def error(self, what: str) -> RunError:
        return RunError(f"rank {self.rank}, while {self.doing}: {what}")

    def end(self) -> None:
        self.progress.end()
        self.words.end()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


_together: _AllRanks | None = None


@contextmanager
def on_all_ranks(*, tells: bool = False) -> Iterator[None]:
    """Context for ranks that measure and plan together: an error on one rank is raised on all. Collective.

    The other ranks raise RunError with the error's text within a second, once they wait for the failed rank. A killed
    rank is named. A nested context has no effect. ``tells``: rank 0 logs a line for every phase
    (:func:`phase`), with a bar on a terminal (:mod:`mdcs.profiler.progress`).
    """
    global _together
    if _together is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    all_ranks = _together = _AllRanks(tells)
    try:
        yield
    except RuntimeError as e:
        explained = str(e) if isinstance(e, RunError) else all_ranks.words.annotate(str(e))
        if explained != str(e):  # another rank's leaving caused this error
            raise all_ranks.error(explained) from e
        all_ranks.words.publish(e)
        raise
    except BaseException as e:
        all_ranks.words.publish(e)
        raise
    finally:
        _together = None
        all_ranks.end()


def phase(what: str, seconds: float | None = None) -> None:
    """Name the present phase of all ranks, such as 'measuring the link', for errors and for progress lines.

    - ``seconds``: the time that it will take.
    """
    if _together is not None:
        _together.begin(what, seconds)


def barrier() -> None:
    """Barrier of all ranks. Inside of :func:`on_all_ranks` it raises RunError if another rank has left."""
    if _together is None:
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()
        return
    work = dist.barrier(group=_together.group, async_op=True)
    assert work is not None
    while True:
        try:
            work.wait(_POLL_INTERVAL)
            return
        except RuntimeError:
            if work.is_completed():  # the barrier has failed, and is not just late
                raise
        if heard := _together.words.peer_failure():
            raise _together.error(heard)


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, by rank. Collective; raises as :func:`barrier` does."""
    values = [value] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(values) > 1:
        barrier()
        dist.all_gather_object(values, value, group=None if _together is None else _together.group)
    return values


def merge_profiles(profile: Profile) -> Profile:
    """Return one profile of all ranks' profiles. Collective.

    It has the median rank's times, the spread over all ranks, the largest bytes, and all uses. Where ranks took
    different branches, its slots are those of the rank that came to most of them. Without ranks the profile is
    returned.
    """
    profiles = all_gather_object(profile)
    first = max(profiles, key=lambda p: sum(slot.seconds > 0 for slot in p.slots))
    alike = [p for p in profiles if _order(p) == _order(first)]
    by_use = [dict(uses(p.slots)) for p in profiles]
    slots = []
    for use, slot in uses(first.slots):
        versions = [slots_of[use] for slots_of in by_use if use in slots_of]
        slots.append(
            dataclasses.replace(
                slot,
                seconds=statistics.median(s.seconds for s in versions),
                live=max(s.live for s in versions),
                peak=max(s.peak for s in versions),
            )
        )
    spread = {}
    for name in first.spread:
        found = [p.spread[name] for p in alike if name in p.spread]
        spread[name] = min(low for low, _ in found), max(high for _, high in found)
    units = tuple(_merge_units(versions) for versions in zip(*(p.units for p in alike), strict=True))
    options = _merge_options(profiles) if len(alike) == len(profiles) else ()
    host_s = statistics.median(p.execution.host_seconds_per_message for p in profiles)
    return dataclasses.replace(
        first, units=units, slots=tuple(slots), spread=spread, recompute=options,
        execution=dataclasses.replace(first.execution, host_seconds_per_message=host_s),
    )  # fmt: skip


def _order(profile: Profile) -> list[tuple[int, str]]:
    return [(slot.unit, slot.phase) for slot in profile.slots]


def _merge_options(profiles: Sequence[Profile]) -> tuple[RecomputeOption, ...]:
    """Return the options that every rank has, in the same slots, with the fewest bytes freed and the highest peaks."""
    found = [{(option.unit, option.choice): option.uses for option in p.recompute} for p in profiles]
    out = []
    for unit, choice in found[0]:
        versions = [options[unit, choice] for options in found if (unit, choice) in options]
        slots = {tuple((use.forward, use.backward) for use in of_rank) for of_rank in versions}
        if len(versions) == len(profiles) and len(slots) == 1:
            out.append(RecomputeOption(unit, choice, tuple(map(_merge_uses, zip(*versions, strict=True)))))
    return tuple(out)


def _merge_uses(versions: Sequence[RecomputeUse]) -> RecomputeUse:
    return dataclasses.replace(
        versions[0],
        freed=min(use.freed for use in versions),
        seconds=statistics.median(use.seconds for use in versions),
        peak=max(use.peak for use in versions),
        forward_peak=max(use.forward_peak for use in versions),
    )


def _merge_units(versions: Sequence[Unit]) -> Unit:
    """Return the first rank's unit, in use from the first to the last slot in which any rank uses it."""
    first = versions[0]
    backward = [u.backward for u in versions if u.backward is not None]
    return dataclasses.replace(
        first,
        forward=_span([u.forward for u in versions]),
        backward=_span(backward) if backward else None,
        whole=tuple(map(_slowest, zip(*(u.whole for u in versions), strict=True))),
        gradients=first.gradients if all(u.gradients and u.backward == first.backward for u in versions) else (),
        aliased=any(u.aliased for u in versions),
    )


def _slowest(versions: Sequence[WholeParameter]) -> WholeParameter:
    """Return the parameter with the slowest rank's update, and the most bytes."""
    return WholeParameter(*map(max, zip(*map(dataclasses.astuple, versions), strict=True)))


def _span(spans: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in spans), max(end for _, end in spans)


def on_rank_zero(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0; return its result on every rank, or raise its error on every rank. Collective.

    An error that cannot be pickled is a RuntimeError of the same text on the other ranks.
    """
    made: Any = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            made = make()
        except Exception as e:  # any error: the other ranks wait for a result
            made = e
    if dist.is_initialized() and dist.get_world_size() > 1:
        box = [_picklable(made) if isinstance(made, Exception) else made]
        barrier()  # rank 0 may leave during make()
        dist.broadcast_object_list(box, src=0, group=None if _together is None else _together.group)
        made = box[0] if made is None else made
    if isinstance(made, Exception):
        raise made
    return cast(T, made)


class Begun(Generic[T]):
    """A value that rank 0 makes in a thread of its own. ``say`` is told it on every rank."""

    def __init__(self, make: Callable[[], T], say: Callable[[T], None]) -> None:
        self._made, self._say = Future[T](), say
        if not dist.is_initialized() or dist.get_rank() == 0:
            Thread(target=self._run, args=(make,), name="mdcs planning", daemon=True).start()

    def _run(self, make: Callable[[], T]) -> None:
        try:
            self._made.set_result(make())
        except BaseException as error:  # raised by result()
            self._made.set_exception(error)

    def is_done(self) -> bool:
        """Return whether the value is made, or has failed. False on other ranks than 0."""
        return self._made.done()

    def result(self) -> T:
        """Return the value on every rank, or raise its error on every rank. Waits for it. Collective."""
        value = on_rank_zero(self._made.result)
        self._say(value)
        return value


def _picklable(error: Exception) -> Exception:
    """Return the error if a pickled copy has the same type and text, else a RuntimeError of its text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's class may fail in any way when it is pickled or unpickled
        copy = None
    return (
        error
        if type(copy) is type(error) and str(copy) == str(error)
        else RuntimeError(f"{type(error).__name__}: {error}")
    )
