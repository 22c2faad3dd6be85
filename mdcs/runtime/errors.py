"""Errors while a plan runs, and the rank and step that they name; the reason why a rank has left, for the other ranks.

The reason is published through the store of the process group, because the rank's own connections end when it leaves. A
killed rank publishes nothing: where a collective fails without a reason, the ranks are called, and ranks that do not
answer are gone. A process that is forked from a rank has none of its threads and shares its connections: there a run is
over, and leaves and ends without sending or waiting.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch.distributed as dist

from mdcs.torch_compat import default_store, own_connection

_CHARACTERS = 400
_KEY, _ROLL, _HERE = "left", "roll", "here/{}"
_LISTEN_S = 0.25  # seconds between a rank's checks whether it is called
_ANSWER_S = 2.0  # seconds to wait for answers: the answering threads may have to wait for a core
_END_S = 5.0  # to wait for the answering thread: one that is in C++ when the interpreter ends aborts the process
_OF_A_PEER = re.compile("gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE)
"""Words in a backend's error when another rank does not take part."""


class RunError(RuntimeError):
    """A failure while training: names rank, step, and the parameter, unit or message in which it happened."""


class OverBudget(RunError):
    """A step that took more bytes than the budget has, where ``over_budget`` is "raise"."""


@dataclass
class ErrorContext:
    """Rank and step, with which error messages begin."""

    rank: int
    step: int = 1
    explain: Callable[[str], str] = str
    """Adds the known cause to the message of a collective that failed."""

    def error(self, what: str) -> RunError:
        """Return the error to raise."""
        return RunError(f"rank {self.rank}, step {self.step}: {what}")

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Name rank and step in errors of collectives that are no messages of the plan."""
        try:
            yield
        except RunError:
            raise
        except RuntimeError as e:
            raise self.error(self.explain(f"{what}: {e}")) from e


class FailureChannel:
    """The failure channel of one run of ``ranks``; a thread answers calls until :meth:`end`.

    - ``run``: a name that only these ranks have; None where there is no other rank. ``store``: that of these ranks.
    - ``doing``: says what a rank leaves; None: the run, in its step.
    - ``duties``: methods that the thread calls at every turn, with its own connection to the store. It holds their
      objects weakly: a run's memory is freed with the run.
    """

    def __init__(
        self, place: ErrorContext, run: str | None, ranks: int, doing: Callable[[], str] | None = None
    ) -> None:
        self.place, self._ranks = place, ranks
        self._doing = doing or (lambda: f"the run in step {place.step}")
        self.store = None if run is None else dist.PrefixStore(f"mdcs/{run}", default_store())
        self.duties: list[weakref.WeakMethod[Callable[[dist.Store], None]]] = []
        self._has_published, place.explain = False, self.annotate
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if self.store is not None:
            arguments = own_connection(self.store), place.rank, self._ended, self.duties
            self._thread = threading.Thread(target=_answer, args=arguments, name="mdcs-presence", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._ended.set)  # end() is not called if the run could not begin

    def publish(self, error: BaseException) -> None:
        """Publish once that this rank has left with an error, unless another rank left first and caused this error."""
        if self.store is not None and not self._has_published and not self.peer_failure():
            self._has_published = True
            with contextlib.suppress(RuntimeError):  # the process of the store is gone
                self.store.set(_KEY, f"rank {self.place.rank} left {self._doing()}: {_words(error)}")

    def publish_uncaught(self) -> None:
        """Publish the uncaught exception that is about to end this process, if there is one."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.publish(error)

    def peer_failure(self) -> str:
        """Return another rank's published reason; "" if there is none, or the store is gone."""
        if self.store is None or self._has_published:
            return ""
        try:
            return self.store.get(_KEY).decode() if self.store.check([_KEY]) else ""
        except RuntimeError:
            return ""

    def annotate(self, message: str) -> str:
        """Return the message of an error here, with the other rank's reason if it has to do with it."""
        reason = self.peer_failure()
        if not reason and not self._has_published and _OF_A_PEER.search(message):
            reason = self._roll_call()
        return f"{message} ({reason})" if reason and reason not in message else message

    def end(self) -> None:
        """End this rank's part: it stops answering, and does not count as gone."""
        self._ended.set()
        if self._thread is not None and self.store is not None:
            with contextlib.suppress(RuntimeError):
                self.store.set(_HERE.format(self.place.rank), "")
            self._thread.join(_END_S)
            self._thread = None

    def forget(self) -> None:
        """Use the store no more: another process has it."""
        self.store = self._thread = None

    def _roll_call(self) -> str:
        """Ask every rank for a sign of life. Publish and return the silent ranks, in words; "" if all answer."""
        if self.store is None:
            return ""
        try:
            self.store.set(_ROLL, "")
            silent = [rank for rank in range(self._ranks) if rank != self.place.rank]
            deadline = time.monotonic() + _ANSWER_S
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [rank for rank in silent if not self.store.check([_HERE.format(rank)])]
            if silent and not self.store.check([_KEY]):
                are = "are" if len(silent) > 1 else "is"
                self.store.set(_KEY, f"{ranks_in_words(silent)} {are} gone: killed, or cut off from the network")
        except RuntimeError:
            return "the process of the store has ended, too"
        return self.peer_failure()


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks, as in ``rank 1`` or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _words(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:_CHARACTERS]


def _answer(
    store: dist.Store, rank: int, ended: threading.Event, duties: list[weakref.WeakMethod[Callable[[dist.Store], None]]]
) -> None:
    """Wait for the call of the ranks, and answer it once; meanwhile do the ``duties``, and publish their errors."""
    has_answered = False
    with contextlib.suppress(RuntimeError):  # the process of the store is gone
        while not ended.wait(_LISTEN_S):
            if not has_answered and store.check([_ROLL]):
                store.set(_HERE.format(rank), "")
                has_answered = True
            for duty in duties:
                try:
                    if (call := duty()) is not None:
                        call(store)
                except Exception as error:  # another rank waits for what was not done
                    if not store.check([_KEY]):
                        store.set(_KEY, f"rank {rank} could not answer another rank: {_words(error)}")
                del call


forgotten_in_child: WeakSet[Any] = WeakSet()
"""Runs that a forked process ends by ``forget()``: without a word to the other ranks, and without threads."""


def _in_child() -> None:
    for run in list(forgotten_in_child):
        run.forget()
        # keeps its process groups: they end by waiting for their threads
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(run))
    if dist.is_initialized():
        gc.freeze()  # nor may the last collection, at the exit, find groups that were used and are garbage


os.register_at_fork(after_in_child=_in_child)
