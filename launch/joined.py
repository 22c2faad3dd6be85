"""Jobs of ranks that somebody else has started, on any number of hosts (`launch.place`): each process starts the one that
computes as its rank, and rank 0 hands out jobs, hears of all, and judges how they end, as `launch.elastic` does on one machine.

    torchrun or srun → a process per rank, this module's → `launch.rank`

They share a store, and need share no files: every rank's last words and exit code are said there, several times a second. So a
host that is gone is one that says nothing any more, whatever its connections look like. Processes are ended by those that started
them. A rank's log is written in the job's folder where its host sees that, and else sent there once the rank has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from launch import elastic, orphans, rendezvous, status
from launch.agent import report_of
from launch.elastic import REPORT_SECONDS, Cluster, Outcome
from launch.place import Place, interface
from launch.rank import AGENT_PID, reason_of
from launch.status import Status

_POLL_SECONDS = 0.1
_TALK_SECONDS = 0.2
_LAST_WORDS_SECONDS = 2.0
_LEAVE_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""How long a host may be silent between jobs."""
_SEEN = "launch.json"
_LOG_BYTES = 256 << 10
"""The most of a log that is sent, its end: a store keeps it in memory."""
_END = "end"


class Gone(RuntimeError):
    """The host of rank 0 does not answer; the message is one line with it, and where this rank was."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """A job as rank 0 hands it out: `payload` is the program's own word for what is to be done.

    `folder` is the job's, on rank 0's host; whoever finds `token` in it sees the same folder.
    """

    number: int
    payload: str
    module: str
    arguments: tuple[str, ...]
    timeout_s: float
    port: int
    folder: str = ""
    token: str = ""

    @property
    def is_seen(self) -> bool:
        """Whether this host sees the job's folder."""
        try:
            said = (Path(self.folder) / _SEEN).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return False
        return bool(self.token) and json.loads(said).get("id") == self.token


class Membership:
    """This process's part in all jobs of a program. Use it as a context manager: leaving it as rank 0 ends the program
    everywhere, with the exit code of `leave`. Raises `launch.place.NoPlace` where the others cannot be reached.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.interface, self.address = interface(place)
        self.host = f"{socket.gethostname()} ({self.address})"
        self._exit_code: int | None = None
        self._number = 0
        if place.serves:
            store, _ = rendezvous.serve(place.address, place.port)
        else:
            store = rendezvous.join(place.address, place.port)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._line = _Line(PrefixStore(f"mdcs/{attempt}", store))

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        place, line = self.place, self._line
        if place.rank == 0:
            line.say(_END, str(1 if self._exit_code is None else self._exit_code))
            line.follow(f"left/{rank}" for rank in range(1, place.world))
            deadline = time.monotonic() + _LEAVE_SECONDS  # one whose host is gone says nothing
            while len([key for key in line.heard if key.startswith("left/")]) < place.world - 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        else:
            line.say(f"left/{place.rank}", "")
        line.close(_LAST_WORDS_SECONDS)

    def leave(self, exit_code: int) -> int:
        """Rank 0: that the program is over, with this exit code, which is returned."""
        self._exit_code = exit_code
        return exit_code

    def receive(self) -> Handed | int:
        """The others: the next job, or the program's exit code once there is none. Raises Gone."""
        key = f"{self._number}/job"
        self._line.follow((key, _END))
        while key not in self._line.heard:
            if _END in self._line.heard:
                return int(self._line.heard[_END])
            self._require_answer(_ANSWER_SECONDS, None)
            time.sleep(_POLL_SECONDS)
        said = json.loads(self._line.heard[key])
        return Handed(**said | {"arguments": tuple(said["arguments"])})

    # ---- rank 0

    def run(
        self,
        run_dir: Path,
        cluster: Cluster,
        env: Mapping[str, str],
        *,
        payload: str,
        module: str,
        arguments: Sequence[str] = (),
        on_tick: Callable[[Sequence[Status | None]], None] = lambda statuses: None,
    ) -> Outcome:
        """As `launch.elastic.run`, with this program's ranks: each runs `module` with a folder of its own and `arguments`.

        What the others said, why they failed, and their logs are in `run_dir` too. All have ended when this call ends, but
        those on a host that is gone.
        """
        run_dir = run_dir.resolve()
        elastic.clear(run_dir)
        store, port = rendezvous.serve(self.place.address)
        token = uuid.uuid4().hex
        job = Handed(self._number, payload, module, tuple(arguments), cluster.timeout_s, port, str(run_dir), token)
        told = {"schema": 1, "id": token, "ranks": cluster.ranks, "module": module, "arguments": list(arguments)}
        (run_dir / _SEEN).write_text(json.dumps(told, indent=1), encoding="utf-8")
        self._number += 1
        child = _Child(self, run_dir, job, env)
        agent = _Ranks(self._line, job, run_dir, cluster, child)
        self._line.follow(agent.keys)
        self._line.say(f"{job.number}/job", json.dumps(dataclasses.asdict(job)))
        outcome = Outcome(False, "interrupted")
        try:
            stuck = elastic.watch(run_dir, cluster, agent, on_tick)
            code = agent.poll()
            if (gone := agent.gone()) is not None:
                outcome = dataclasses.replace(gone, lost=True)
            else:
                outcome = elastic.outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        finally:
            child.end()
            self._line.say(f"{job.number}/over", json.dumps({"ok": outcome.ok, "reason": outcome.reason}))
            self._line.follow(())
            self._line.flush(_LAST_WORDS_SECONDS)
            self._take_logs(job, run_dir, agent.elsewhere())
        del store  # lives as long as the ranks that use it
        return outcome

    def _take_logs(self, job: Handed, run_dir: Path, ranks: Sequence[int]) -> None:
        """Leave in the folder what these ranks' hosts send of their logs; a host that is gone sends none."""
        waited = {rank: _log_of(job, rank) for rank in ranks}
        self._line.follow(waited.values())
        deadline = time.monotonic() + (_LEAVE_SECONDS if waited else 0.0)
        while any(key not in self._line.heard for key in waited.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._line.follow(())
        for rank, key in waited.items():
            if (text := self._line.heard.pop(key, None)) is not None:
                with contextlib.suppress(OSError):
                    (run_dir / f"rank{rank}.log").write_text(text, encoding="utf-8")

    # ---- the others

    def take_part(self, job: Handed, folder: Path, env: Mapping[str, str]) -> Outcome:
        """Run a job's rank to its end in `folder`, and hear from rank 0 how all have ended. Raises Gone, which names the log."""
        over, log = f"{job.number}/over", folder / f"rank{self.place.rank}.log"
        self._number = job.number + 1
        elastic.clear(folder)
        seen = job.is_seen
        if seen:
            log.symlink_to(Path(job.folder) / log.name)
        child = _Child(self, folder, job, env, elsewhere=not seen)
        self._line.follow((over,))
        self._line.say_always(said_by(job, self.place.rank), child.said)
        try:
            while over not in self._line.heard:
                # Once it has failed, a host that is silent is likely to be why.
                self._require_answer(job.timeout_s / (2 if child.poll() else 1), status.read(folder, self.place.rank))
                time.sleep(_POLL_SECONDS)
        except Gone as error:
            raise Gone(f"{error}; its log is {log.resolve()}") from error
        finally:
            child.end()
            if not seen:
                self._line.say(_log_of(job, self.place.rank), _end_of(log))
            self._line.flush(_LAST_WORDS_SECONDS)
        return Outcome(**json.loads(self._line.heard[over]))

    def _require_answer(self, seconds: float, said: Status | None) -> None:
        silent = time.monotonic() - self._line.answered
        if silent > seconds:
            where = "" if said is None else f"; rank {said.rank}, on {self.host}, was at step {said.step} ({said.phase})"
            raise Gone(f"host {self.place.address}, that of rank 0, has not answered for {silent:.0f} s{where}")


def said_by(job: Handed, rank: int) -> str:
    """Where in the store a rank says how it is."""
    return f"{job.number}/said/{rank}"


def _log_of(job: Handed, rank: int) -> str:
    """Where in the store a rank's log is once the rank has ended."""
    return f"{job.number}/log/{rank}"


def _end_of(log: Path) -> str:
    """The log, or the last of it where it is long."""
    try:
        with log.open("rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES)
            file.seek(left_out)
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(the log could not be read: {error})\n"
    return f"(the first {left_out} bytes are left out)\n{text}" if left_out else text


class _Child:
    """The process that computes as this rank; what it says of itself is in its folder."""

    def __init__(
        self, member: Membership, folder: Path, job: Handed, env: Mapping[str, str], *, elsewhere: bool = False
    ) -> None:
        self._rank, self._host, self._folder, self._ended = member.place.rank, member.host, folder, False
        self._elsewhere = elsewhere  # its log is, and is to be sent
        through = {f"{library}_SOCKET_IFNAME": member.interface for library in ("GLOO", "NCCL") if member.interface}
        command = [sys.executable, "-u", "-m", "launch.rank", str(folder), job.module, str(folder), *job.arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **through,  # whoever knows better has said so
                **os.environ,
                **env,
                **member.place.environment(),
                "MASTER_PORT": str(job.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0's is served already
                AGENT_PID: str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(elastic.ROOT), os.environ.get("PYTHONPATH")])),
            },
        )

    def poll(self) -> int | None:
        return -signal.SIGTERM if self._ended else self._process.poll()

    def end(self) -> None:
        """With all that it has started."""
        self._ended = self._process.poll() is None  # by this process, which is no reason
        orphans.kill_groups([self._process.pid])
        self._process.wait()

    def said(self) -> str:
        """What it last said, and how it ended once it has, as JSON."""
        code = self.poll()  # first: what it said before it ended is said by now
        said, error = status.read(self._folder, self._rank), None
        with contextlib.suppress(OSError):
            error = (self._folder / f"rank{self._rank}.error").read_text(encoding="utf-8")
        told = None if said is None else dataclasses.asdict(said)
        return json.dumps({"host": self._host, "status": told, "code": code, "error": error, "elsewhere": self._elsewhere})


class _Ranks:
    """All ranks as `launch.elastic.watch` sees an agent; leaves in the folder what the others say."""

    def __init__(self, line: _Line, job: Handed, folder: Path, cluster: Cluster, child: _Child) -> None:
        self._line, self._folder, self._cluster, self._child = line, folder, cluster, child
        self.keys = [said_by(job, rank) for rank in range(1, cluster.ranks)]
        self._said: dict[int, dict[str, Any]] = {}
        self._failed: float | None = None

    def poll(self) -> int | None:
        for rank, key in enumerate(self.keys, 1):
            if (heard := self._line.heard.get(key)) is not None:
                self._leave(rank, json.loads(heard.partition(" ")[2]))
        codes = [self._child.poll(), *(self._said.get(rank, {}).get("code") for rank in range(1, self._cluster.ranks))]
        if all(code == 0 for code in codes):
            return 0
        if self.gone():
            return 1
        if any(codes):
            if self._failed is None:
                self._failed = time.monotonic()
            self._report(0, codes[0])
            if None not in codes or time.monotonic() - self._failed > REPORT_SECONDS:
                return 1
        return None

    def gone(self) -> Outcome | None:
        """That a host says nothing any more, if that is why the job ends."""
        limit = self._cluster.timeout_s / (2 if self._failed else 1)
        silent = {rank: self._line.unchanged(self.keys[rank - 1]) for rank in self._said}
        longest = max(silent, key=silent.__getitem__, default=None)
        if longest is None or silent[longest] <= limit:
            return None
        host = self._said[longest]["host"]
        # The last words of its ranks come a moment apart.
        gone = [rank for rank in sorted(silent) if self._said[rank]["host"] == host and silent[rank] > limit / 2]
        reason = f"host {host} has not answered for {silent[longest]:.0f} s: {', '.join(map(self._where, gone))}"
        return Outcome(False, reason, gone[0], (self._said[gone[0]]["status"] or {}).get("step"))

    def elsewhere(self) -> list[int]:
        """The ranks whose logs are on other hosts."""
        return [rank for rank, said in self._said.items() if said.get("elsewhere")]

    def _where(self, rank: int) -> str:
        said = self._said[rank]["status"]
        return f"rank {rank} was at step {said['step']} ({said['phase']})" if said else f"rank {rank} had not started"

    def _leave(self, rank: int, said: dict[str, Any]) -> None:
        if said == self._said.get(rank):
            return
        self._said[rank] = said
        if said["status"]:
            status.write(self._folder, Status(**said["status"]))
        if said["error"] and not (error := self._folder / f"rank{rank}.error").exists():
            reason_of(self._folder, rank).write(said["error"])
            assert error.exists()
        self._report(rank, said["code"])

    def _report(self, rank: int, code: int | None) -> None:
        file = report_of(self._folder, rank)
        if code:
            file.write(json.dumps({"schema": 1, "exit_codes": {rank: code}}))


class _Line(threading.Thread):
    """What is said to and heard from the store: by one thread, as a host that is gone may never answer."""

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
        """Say what `said` returns in every round, after a number that is never the same."""
        self._always = key, said

    def follow(self, keys: Iterable[str]) -> None:
        """Hear `keys` in every round from now on, and no others."""
        self._followed = tuple(keys)

    def unchanged(self, key: str) -> float:
        """Seconds since another word was heard; 0 while nothing is heard of anybody, for which nobody else is to blame."""
        return max(0.0, self.answered - self._changed.get(key, self.answered))

    def flush(self, seconds: float) -> None:
        """Wait until what was said until now has been heard, but no longer than so, and not for a host that is silent."""
        if time.monotonic() - self.answered > seconds:
            return
        with self._lock:
            target = self._round + 2
            self._lock.wait_for(lambda: self._round >= target or not self.is_alive(), seconds)

    def close(self, seconds: float) -> None:
        self.flush(seconds)
        self._closed = True

    def run(self) -> None:
        with contextlib.suppress(RuntimeError):  # torch's of a store whose host has gone: `answered` tells
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
