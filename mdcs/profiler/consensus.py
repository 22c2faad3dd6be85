"""One result, one plan and one error for all ranks: an error on one rank is raised on the others, too.

Progress is a line per phase, and on a terminal a bar that moves with the clock. Lines go to the log, or to stderr where
the program has not configured logging.
"""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from mdcs.runtime.errors import ErrorContext, FailureChannel, RunError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_POLL_INTERVAL = timedelta(seconds=0.5)  # between a waiting rank's checks whether another rank has left
_BAR, _REDRAWN_S = 20, 0.5  # characters of the bar, and seconds until it moves


def tell(line: str, logger: logging.Logger) -> None:
    """Log a line as information; write it to stderr if nobody handles the log."""
    if logger.hasHandlers():
        logger.info(line)
    else:
        print(f"mdcs: {line}", file=sys.stderr, flush=True)


class Progress:
    """The present phase, shown until the next one begins."""

    def __init__(self) -> None:
        self._began, self._ended = time.monotonic(), threading.Event()
        self._drawing: threading.Thread | None = None

    def begin(self, phase: str, seconds: float | None) -> None:
        """Show a phase. ``seconds``: the seconds that it will take; None: not known, so it has no bar."""
        self.end()
        limit = "" if seconds is None else f", about {max(1.0, seconds):.0f} s"
        tell(f"{phase}{limit} (after {time.monotonic() - self._began:.0f} s)", logger)
        if seconds is not None and sys.stderr.isatty() and not logger.hasHandlers():
            self._ended = threading.Event()
            self._drawing = threading.Thread(target=self._draw, args=(seconds, self._ended), daemon=True)
            self._drawing.start()

    def end(self) -> None:
        """End the present phase, and its bar."""
        if self._drawing is not None:
            self._ended.set()
            self._drawing.join()
            self._drawing = None

    @staticmethod
    def _draw(seconds: float, ended: threading.Event) -> None:
        began = time.monotonic()
        while not ended.wait(_REDRAWN_S):
            full = round(_BAR * min(1.0, (time.monotonic() - began) / seconds))
            print(f"\rmdcs: [{'#' * full}{'.' * (_BAR - full)}]", end="", file=sys.stderr, flush=True)
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # the next line takes the place of the bar


# ---- ranks


def world_size() -> int:
    """Return the number of ranks; 1 without any."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_rank_zero() -> bool:
    """Return whether this is rank 0, or there are no ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def machine_id() -> str:
    """Return a name of the machine, equal for all processes that share its clock and cores, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def ranks_per_node() -> int:
    """Return the ranks per host if several hosts have equally many (more than 1), in rank order; else 0. Collective.

    LOCAL_WORLD_SIZE of torchrun counts if all ranks have the same value; otherwise the machines of the ranks.
    """
    world, local = world_size(), os.environ.get("LOCAL_WORLD_SIZE")
    seen = all_gather_object((local, machine_id()))
    hosts = [host for _, host in seen]
    runs = [len(list(same)) for _, same in itertools.groupby(hosts)]
    count = runs[0] if len(set(runs)) == 1 and len(runs) == len(set(hosts)) else 0
    if local is not None and {size for size, _ in seen} == {local}:
        count = int(local)
    return count if 1 < count < world and world % count == 0 else 0


class _AllRanks:
    """The current phase of all ranks, with a group of their own: a failed rank leaves nothing in the loop's group."""

    def __init__(self, tells: bool) -> None:
        self.doing, self.rank = "planning", dist.get_rank()
        self.progress = Progress() if tells and self.rank == 0 else None
        self.group = dist.new_group(backend="gloo")
        run = [uuid.uuid4().hex]
        dist.broadcast_object_list(run, src=0, group=self.group)
        self.words = FailureChannel(ErrorContext(self.rank), run[0], world_size(), lambda: f"while {self.doing}")

    def begin(self, what: str, seconds: float | None) -> None:
        self.doing = what
        if self.progress is not None:
            self.progress.begin(what, seconds)

    def error(self, what: str) -> RunError:
        return RunError(f"rank {self.rank}, while {self.doing}: {what}")

    def end(self) -> None:
        if self.progress is not None:
            self.progress.end()
        self.words.end()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)


_together: _AllRanks | None = None


@contextmanager
def on_all_ranks(*, tells: bool = False) -> Iterator[None]:
    """Context for ranks that measure and plan together: an error on one rank is raised on all. Collective.

    The other ranks raise RunError with the error's text within a second, once they wait for the failed rank. A killed
    rank is named. A nested context has no effect. ``tells``: rank 0 logs a line for every phase (:func:`phase`), with a
    bar on a terminal.
    """
    global _together
    if _together is not None or world_size() == 1:
        yield
        return
    all_ranks = _together = _AllRanks(tells)
    try:
        yield
    except BaseException as e:
        if isinstance(e, RuntimeError) and not isinstance(e, RunError):
            explained = all_ranks.words.annotate(str(e))
            if explained != str(e):  # another rank's leaving caused this error
                raise all_ranks.error(explained) from e
        all_ranks.words.publish(e)
        raise
    finally:
        _together = None
        all_ranks.end()


def phase(what: str, seconds: float | None = None) -> None:
    """Name the present phase of all ranks, for errors and for progress lines. ``seconds``: that it will take."""
    if _together is not None:
        _together.begin(what, seconds)


def barrier() -> None:
    """Barrier of all ranks. Inside of :func:`on_all_ranks` it raises RunError if another rank has left."""
    if _together is None:
        if world_size() > 1:
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
    values = [value] * world_size()
    if len(values) > 1:
        barrier()
        dist.all_gather_object(values, value, group=None if _together is None else _together.group)
    return values


def on_rank_zero(make: Callable[[], T]) -> T:
    """Call ``make`` on rank 0; return its result on every rank, or raise its error on every rank. Collective.

    An error that cannot be pickled is a RuntimeError of the same text on the other ranks.
    """
    made: Any = None
    if is_rank_zero():
        try:
            made = make()
        except Exception as e:  # any error: the other ranks wait for a result
            made = e
    if world_size() > 1:
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
        if is_rank_zero():
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
    is_same = type(copy) is type(error) and str(copy) == str(error)
    return error if is_same else RuntimeError(f"{type(error).__name__}: {error}")
