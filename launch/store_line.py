"""A process's line to the store that all processes of a joined program share (`launch.joined`)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

from torch.distributed import Store

_TALK_SECONDS = 0.2


class StoreLine(threading.Thread):
    """The thread that reads from and writes to the store. Calls to a store on a lost host may never return."""

    def __init__(self, store: Store) -> None:
        super().__init__(name="membership", daemon=True)
        self.heard: dict[str, str] = {}
        self.answered = time.monotonic()
        self._store, self._lock = store, threading.Condition()
        self._to_say: dict[str, str] = {}
        self._always: tuple[str, Callable[[], str]] | None = None
        self._followed: tuple[str, ...] = ()
        self._changed: dict[str, float] = {}
        self._round, self._closed = 0, False
        self.start()

    def say(self, key: str, text: str) -> None:
        with self._lock:
            self._to_say[key] = text

    def say_always(self, key: str, said: Callable[[], str]) -> None:
        """Write the result of `said` in every round, after the number of the round, so that the text always changes."""
        self._always = key, said

    def follow(self, keys: Iterable[str]) -> None:
        """Read `keys` in every round from now on, and no other keys."""
        self._followed = tuple(keys)

    def unchanged(self, key: str) -> float:
        """Seconds for which the value of `key` had not changed at the store's last answer; 0 if it was never read.

        Time in which the store is silent does not count: the process behind `key` is not to blame for it.
        """
        return max(0.0, self.answered - self._changed.get(key, self.answered))

    def flush(self, seconds: float) -> None:
        """Wait until everything written before this call is in the store, at most `seconds`.

        Returns at once if the store has been silent for longer than `seconds`.
        """
        if time.monotonic() - self.answered > seconds:
            return
        with self._lock:
            target = self._round + 2
            self._lock.wait_for(lambda: self._round >= target or not self.is_alive(), seconds)

    def close(self, seconds: float) -> None:
        self.flush(seconds)
        self._closed = True

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised by torch when the store's host is gone; `answered` shows it
            while not self._closed:
                self._talk()
                with self._lock:
                    self._round += 1
                    self._lock.notify_all()
                time.sleep(_TALK_SECONDS)

    def _talk(self) -> None:
        with self._lock:
            said, self._to_say = self._to_say, {}
        if self._always is not None:
            key, words = self._always
            said[key] = f"{self._round} {words()}"
        for key, text in said.items():
            self._store.set(key, text)
        for key in self._followed:
            if key in self._changed or self._store.check([key]):
                text = self._store.get(key).decode()
                if text != self.heard.get(key):
                    self.heard[key], self._changed[key] = text, time.monotonic()
        self.answered = time.monotonic()
