"""The store by which ranks find each other, and by which those of torchrun or srun (`launch.spmd`) say where they are.

It listens on one address: its socket is bound before torch gets it. Stores of torch's own rendezvous listen on all
interfaces of the machine, whatever address is requested.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore

from launch import status
from launch.elastic import REPORT_SECONDS, Cluster, Outcome
from launch.rank import reason_of, report_of
from launch.status import Status

_JOIN = datetime.timedelta(minutes=10)
TALK_SECONDS, _CLOSE_SECONDS = 0.2, 2.0
_STATUS_SECONDS = 1.0
"""Least time between two writes of a running rank's status to the job's folder, whose file system may be shared."""
LOG_BYTES = 256 << 10
"""Only the last bytes of a log are sent, up to this number: the store keeps them in memory."""
SILENT_SECONDS = 3.0
"""Silence by which a process that has ended is told from one that runs, once it is known that one has failed."""


def serve(address: str, port: int = 0) -> tuple[TCPStore, int]:
    """A store that listens on `address` alone, and its port (0 takes a free one). It ends with this process."""
    listener = socket.create_server((address, port), backlog=socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return serve_on(listener.detach(), address, port), port


def serve_on(listener: int, address: str, port: int) -> TCPStore:
    """A store that listens on a socket that is already bound to `address` and `port`."""
    return TCPStore(address, port, None, True, _JOIN, wait_for_workers=False, master_listen_fd=listener)


def join(address: str, port: int) -> TCPStore:
    """The store that another process serves at this address. Waits until it is there."""
    return TCPStore(address, port, None, False, _JOIN, wait_for_workers=False)


def meet(seconds: float) -> None:
    """Wait until every rank of this rank's job has called this, lest a late one be taken for lost in a collective.

    Raises torch's DistStoreError, a RuntimeError, when a rank has not come within `seconds`.
    """
    store = join(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store.set(f"here/{os.environ['RANK']}", "")
    everyone = [f"here/{rank}" for rank in range(int(os.environ["WORLD_SIZE"]))]
    store.wait(everyone, datetime.timedelta(seconds=seconds))


class Beat(threading.Thread):
    """Writes this rank's record (`say`, for JSON) to the store again and again, and reads those of others (`heard`).

    answered: when the store has answered last. Calls to a store on a lost host may never return.
    """

    def __init__(self, store: Store, own: int, others: Sequence[int], say: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(name="beat", daemon=True)
        self.heard: dict[int, dict[str, Any]] = {}
        self.answered = time.monotonic()
        self.rounds, self._closed = 0, False
        self._store, self._own, self._others, self._say = store, own, others, say
        self._changed: dict[int, tuple[str, float]] = {}

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # raised by torch when the store's host is gone; `answered` shows it
            while not self._closed:
                self._store.set(f"said/{self._own}", json.dumps({"beat": self.rounds, **self._say()}))
                for other in self._others:
                    if other in self.heard or self._store.check([f"said/{other}"]):
                        text = self._store.get(f"said/{other}").decode()
                        if text != self._changed.get(other, ("", 0.0))[0]:
                            self._changed[other], self.heard[other] = (text, time.monotonic()), json.loads(text)
                self.answered, self.rounds = time.monotonic(), self.rounds + 1
                time.sleep(TALK_SECONDS)

    def close(self) -> None:
        """End the thread: one that is in the store's code when Python ends would abort the process."""
        self._closed = True
        self.join(_CLOSE_SECONDS)

    def unchanged(self, other: int) -> float:
        """Seconds for which a rank had said nothing new at the store's last answer; its silence does not count."""
        return max(0.0, self.answered - self._changed.get(other, ("", self.answered))[1])


class Watched:
    """All ranks of the job of this number, for rank 0, whose exit code `own` returns once it has ended.

    Writes the status of the others into the folder.
    """

    def __init__(self, beat: Beat, own: Callable[[], int | None], number: int, folder: Path, cluster: Cluster) -> None:
        self._beat, self._own, self._number, self._folder, self._cluster = beat, own, number, folder, cluster
        self._written: dict[int, tuple[Status, float]] = {}
        self._failed: float | None = None
        self._begun = time.monotonic()

    def _heard(self) -> dict[int, dict[str, Any]]:
        """Records of the other ranks that have begun the job."""
        return {each: record for each, record in dict(self._beat.heard).items() if record["job"] == self._number}

    def _codes(self) -> list[int | None]:
        heard = self._heard()
        return [self._own(), *(heard.get(each, {}).get("code") for each in range(1, self._cluster.ranks))]

    def ended(self) -> bool:
        return None not in self._codes()

    def poll(self) -> int | None:
        """Return None while the ranks run, 0 once all have ended well, and 1 once it is known why one has failed."""
        for each, record in self._heard().items():
            self._keep(each, record)
        codes = self._codes()
        if all(code == 0 for code in codes):
            return 0
        if any(codes) and self._failed is None:
            self._failed = time.monotonic()
        for each, code in enumerate(codes):
            if code:
                report_of(self._folder, each).write(json.dumps({"schema": 1, "exit_codes": {each: code}}))
        is_known = self._failed is not None and (None not in codes or time.monotonic() - self._failed > REPORT_SECONDS)
        return 1 if is_known or self.gone() else None

    def gone(self, *, ending: bool = False) -> Outcome | None:
        """The outcome if a host has stopped answering, or a rank's process has ended without a word; else None.

        ending: somebody ends this process, which is what happens to the other ranks when the process of one has ended.
        """
        heard = self._heard()
        silent = {each: self._beat.unchanged(each) for each, record in heard.items() if record["code"] is None}
        longest = max(silent, key=silent.__getitem__, default=None)
        unheard = next((each for each in range(1, self._cluster.ranks) if each not in heard), None)
        if ending and unheard and time.monotonic() - self._begun > SILENT_SECONDS:
            return Outcome(False, f"the process of rank {unheard} ended before it reported a status", unheard)
        if longest is None:
            return None
        host, limit = heard[longest]["host"], self._cluster.timeout_s / (2 if self._failed else 1)
        if silent[longest] > limit:
            # The last statuses of its ranks arrive at slightly different times.
            gone = [each for each in sorted(silent) if heard[each]["host"] == host and silent[each] > limit / 2]
            where = ", ".join(_where(each, heard[each]) for each in gone)
            reason = f"host {host} has not answered for {silent[longest]:.0f} s: {where}"
            return Outcome(False, reason, gone[0], _step(heard[gone[0]]), lost=True)
        is_due = ending or self._failed is not None and time.monotonic() - self._failed > REPORT_SECONDS
        if is_due and silent[longest] > SILENT_SECONDS:
            where = _where(longest, heard[longest])
            reason = f"the process of rank {longest} on host {host} ended without an error message: {where}"
            return Outcome(False, reason, longest, _step(heard[longest]))
        return None

    def elsewhere(self) -> list[int]:
        """The ranks whose logs are on other hosts."""
        return [each for each, record in self._heard().items() if record["elsewhere"]]

    def _keep(self, each: int, record: Mapping[str, Any]) -> None:
        """Write the status of a rank: its steps at most once a second, its phases and its last status at once."""
        if record["error"] and not (self._folder / f"rank{each}.error").exists():
            reason_of(self._folder, each).write(record["error"])
        if not record["status"]:
            return
        now, ended = Status(**record["status"]), record["code"] is not None or bool(record["error"])
        before, when = self._written.get(each, (None, 0.0))
        is_new_phase = before is None or before.phase != now.phase
        if now != before and (ended or is_new_phase or time.monotonic() - when >= _STATUS_SECONDS):
            status.write(self._folder, now)
            self._written[each] = now, time.monotonic()


def _step(record: Mapping[str, Any]) -> int | None:
    return (record["status"] or {}).get("step")


def _where(each: int, record: Mapping[str, Any]) -> str:
    known = record["status"]
    return f"rank {each} was at step {known['step']} ({known['phase']})" if known else f"rank {each} had not started"


def end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
            file.seek(left_out)
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(the log could not be read: {error})\n"
    return f"(the first {left_out} bytes are left out)\n{text}" if left_out else text
