"""A mirror that cannot stop a run: it works in its own thread, and its first failure or silence is one warning."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from experiments.trackers.tracker import Mirror

SECRETS = ("WANDB_API_KEY",)


class Aside:
    """Calls a mirror's methods in order, in another thread. The caller waits only in `finish`.

    title: for warnings. timeout_s (s): the mirror is given up when one call takes longer. make: starts the mirror.
    Warnings come from the caller's thread, at its next call.
    """

    def __init__(self, title: str, timeout_s: float, make: Callable[[], Mirror]) -> None:
        self._title, self._timeout_s = title, timeout_s
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._doing, self._since = "start", time.monotonic()  # since: infinite between two calls
        self._failure = ""
        self._left_alone = False
        self._thread = threading.Thread(target=self._work, args=(make,), name=title, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Have the mirror call `method` after all earlier calls."""
        self._look()
        if not self._left_alone:
            self._calls.put((method, arguments))

    def finish(self, ok: bool) -> None:
        """Have the mirror finish, and wait for it while each call ends within `timeout_s`."""
        self.call("finish", ok)
        while self._thread.is_alive() and not self._left_alone:
            self._thread.join(0.05)
            self._look()
        self._look()

    def _look(self) -> None:
        silent = time.monotonic() - self._since > self._timeout_s
        reason = self._failure or (f"no answer for {self._timeout_s:g} s" if silent else "")
        if reason and not self._left_alone:
            self._left_alone = True
            warnings.warn(f"{self._title} could not {self._doing}, the run goes on without it: {reason}", stacklevel=3)

    def _work(self, make: Callable[[], Mirror]) -> None:
        try:
            mirror = make()
            while self._doing != "finish":
                self._since = math.inf
                method, arguments = self._calls.get()
                self._doing, self._since = _WORDS.get(method, f"log {method}"), time.monotonic()
                getattr(mirror, method)(*arguments)
            self._since = math.inf
        except Exception as error:  # a tracker may raise anything; training continues
            self._failure = one_line(error)


_WORDS = {"event": "log", "finish": "finish"}


def one_line(error: Exception) -> str:
    """An error's type and text, without secrets."""
    text = str(error)
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, f"${name}")
    return f"{type(error).__name__}: {' '.join(text.split()) or 'no reason given'}"
