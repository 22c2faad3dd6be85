"""Why a rank has left: told to the others, who would else only see that it is gone, or wait for it.

By way of the store that the process group was made with, for the rank's own connections end with its part in the run. A rank
that was killed says nothing: where a collective fails and nothing was said, the ranks are called, and those that do not answer
are gone.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mdcs.runtime.errors import Place

_CHARACTERS = 400
_KEY, _ROLL, _HERE = "left", "roll", "here"
_LISTEN_S = 0.25  # how often a rank looks whether it is called
_ANSWER_S = 2.0  # how long the others are waited for: their threads may have to wait for a core
_OF_A_PEER = re.compile("gloo|nccl|connection|socket|broken pipe|timed? ?out", re.IGNORECASE)
"""What backends say when another rank does not take part."""


class LastWords:
    """Of one run of ``ranks``. ``run`` is a name that only they have; None where there is no other rank to tell.

    ``doing`` says what ranks leave; None: the run, in its step. A thread answers until :meth:`end`.
    """

    def __init__(self, place: Place, run: str | None, ranks: int, doing: Callable[[], str] | None = None) -> None:
        self._place, self._ranks = place, ranks
        self._doing = doing or (lambda: f"the run in step {place.step}")
        self._store = None if run is None else dist.PrefixStore(f"mdcs/{run}", _get_default_store())
        self._said = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if self._store is not None:
            arguments = _own_connection(self._store), self._here(place.rank), self._ended
            self._thread = threading.Thread(target=_answer, args=arguments, name="mdcs-presence", daemon=True)
            self._thread.start()
            weakref.finalize(self, self._ended.set)  # where a run could not begin, nobody ends it

    def say(self, error: BaseException) -> None:
        """Tell the others that this rank has left with an error, once, unless one has before: its error is what came of that."""
        if self._store is not None and not self._said and not self.heard():
            words = " ".join(f"{type(error).__name__}: {error}".split())[:_CHARACTERS]
            self._said = True
            with contextlib.suppress(RuntimeError):  # the store went with its process
                self._store.set(_KEY, f"rank {self._place.rank} left {self._doing()}: {words}")

    def say_uncaught(self) -> None:
        """The same of what is about to end this process, if anything is."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.say(error)

    def heard(self) -> str:
        """What another rank has left with; empty if none has, or nothing can be heard."""
        if self._store is None or self._said:
            return ""
        try:
            return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""
        except RuntimeError:
            return ""

    def after(self, message: str) -> str:
        """The message of an error here, and what another rank's leaving has to do with it."""
        heard = self.heard()
        if not heard and not self._said and _OF_A_PEER.search(message):
            heard = self._called()
        return f"{message} ({heard})" if heard and heard not in message else message

    def end(self) -> None:
        """This rank's part is over: it answers no more, and is not taken for gone."""
        self._ended.set()
        if self._thread is not None and self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(self._here(self._place.rank), "")
            self._thread.join(1.0)
            self._thread = None

    def _called(self) -> str:
        """Which ranks do not answer, said to all; empty if all do."""
        if self._store is None:
            return ""
        try:
            self._store.set(_ROLL, "")
            silent = [rank for rank in range(self._ranks) if rank != self._place.rank]
            deadline = time.monotonic() + _ANSWER_S
            while silent and time.monotonic() < deadline:
                time.sleep(0.05)
                silent = [rank for rank in silent if not self._store.check([self._here(rank)])]
            if silent and not self._store.check([_KEY]):
                which = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
                self._store.set(_KEY, f"{which} {'are' if len(silent) > 1 else 'is'} gone without a word: killed, or cut off")
        except RuntimeError:
            return "so is the process that has the process group's store"
        return self.heard()

    @staticmethod
    def _here(rank: int) -> str:
        return f"{_HERE}/{rank}"


def _answer(store: dist.Store, here: str, ended: threading.Event) -> None:
    """Until the ranks are called, once."""
    with contextlib.suppress(RuntimeError):  # the store went with its process
        while not ended.wait(_LISTEN_S):
            if store.check([_ROLL]):
                store.set(here, "")
                return


def _own_connection(store: dist.Store) -> dist.Store:
    """A store that answers while another thread waits in the first, if this torch can make one."""
    try:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # since torch 2.7
    except (AttributeError, RuntimeError):
        return store
    return own
