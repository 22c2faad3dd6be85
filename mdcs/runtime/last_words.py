"""Why a rank has left a run: told to the others, who would else only see that it is gone, or wait for it.

By way of the store that the process group was made with, for the rank's own connections end with its part in the run.
"""

from __future__ import annotations

import contextlib
import sys

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mdcs.runtime.errors import Place

_CHARACTERS = 400
_KEY = "left"


class LastWords:
    """Of one run. ``run`` is a name that only its ranks have; None where there is no other rank to tell."""

    def __init__(self, place: Place, run: str | None) -> None:
        self._place = place
        self._store = None if run is None else dist.PrefixStore(f"mdcs/{run}", _get_default_store())
        self._said = False

    def say(self, error: BaseException) -> None:
        """Tell the others that this rank has left with an error, once, unless one has before: its error is what came of that."""
        if self._store is not None and not self._said and not self.heard():
            words = " ".join(f"{type(error).__name__}: {error}".split())[:_CHARACTERS]
            self._said = True
            with contextlib.suppress(RuntimeError):  # the store went with its process
                self._store.set(_KEY, f"rank {self._place.rank} left the run in step {self._place.step}: {words}")

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
        return f"{message} ({heard})" if heard and heard not in message else message
