"""A mirror that cannot stop a run: it works in its own thread, and its first failure or silence is one warning."""

from __future__ import annotations

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
        self._title, self._timeout_s, self._make = title, timeout_s, make
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._doing: tuple[str, float] | None = ("start", time.monotonic())  # (activity, its start)
        self._failure: str | None = None
        self._left_alone = False
        self._thread = threading.Thread(target=self._work, name=title, daemon=True)
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
        if self._left_alone:
            return
        doing = self._doing
        if self._failure is None and doing is not None and time.monotonic() - doing[1] > self._timeout_s:
            self._failure = f"could not {doing[0]}, the run goes on without it: no answer for {self._timeout_s:g} s"
        if self._failure is not None:
            self._left_alone = True
            warnings.warn(f"{self._title} {self._failure}", stacklevel=3)

    def _work(self) -> None:
        try:
            mirror = self._make()
            while True:
                self._doing = None
                method, arguments = self._calls.get()
                self._doing = (_WORDS.get(method, f"log {method}"), time.monotonic())
                getattr(mirror, method)(*arguments)
                if method == "finish":
                    return
        except Exception as error:  # a tracker may raise anything; training continues
            what = "start" if self._doing is None else self._doing[0]
            self._failure = f"could not {what}, the run goes on without it: {one_line(error)}"


_WORDS = {"event": "log", "finish": "finish"}


def one_line(error: Exception) -> str:
    """An error's type and text, without secrets."""
    text = str(error)
    for name in SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, f"${name}")
    return f"{type(error).__name__}: {' '.join(text.split()) or 'no reason given'}"
