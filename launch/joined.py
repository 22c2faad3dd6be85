"""Jobs whose ranks somebody else has started, on any number of hosts (`launch.place`).

    torchrun or srun → a process per rank, this module's → `launch.rank`

Each process of this module starts the process that computes as its rank. Rank 0 hands out jobs, receives the status of
all ranks, and judges how a job ends, as `launch.elastic` does on one machine.

The processes share a store and need no shared files. Each rank's last status and exit code are written to the store
several times a second, so a host is lost when it stops writing, whatever its connections look like. Each process ends
only the process that it started. A rank's log is written in the job's folder where its host sees the folder; elsewhere
it is sent there after the rank has ended.
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
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore

from launch import elastic, orphans, rendezvous, status
from launch.elastic import REPORT_SECONDS, Cluster, Outcome
from launch.place import Place, interface
from launch.rank import AGENT_PID, reason_of, report_of
from launch.status import Status
from launch.store_line import StoreLine

_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0
"""Least time between two writes of a running rank's status to the job's folder, whose file system may be shared."""
_LAST_WORDS_SECONDS = 2.0
_LEAVE_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""Seconds that a host may be silent between jobs."""
_SEEN = "launch.json"
_LOG_BYTES = 256 << 10
"""Only the last bytes of a log are sent, up to this number: the store keeps them in memory."""
_END = "end"


class Gone(RuntimeError):
    """The host of rank 0 does not answer. The message is one line with the host and the place of this rank."""


@dataclasses.dataclass(frozen=True)
class Handed:
    """A job as rank 0 hands it out.

    - number: jobs of a program are counted from 0.
    - payload: the program's own description of the job.
    - module, arguments: what each rank runs.
    - timeout_s (s): see `launch.elastic.Cluster`.
    - port: of the store that the ranks use.
    - folder: the job's folder on rank 0's host. A host that finds `token` in `folder` sees the same folder.
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
    """This process's part in all jobs of a program, as a context manager.

    When rank 0 leaves the block, the program ends on all ranks with the exit code of `leave`. Raises
    `launch.place.NoPlace` where the other ranks cannot be reached.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.interface, self.address = interface(place)
        self.host = f"{socket.gethostname()} ({self.address})"
        self._exit_code: int | None = None
        self._lost: Outcome | None = None
        self._number = 0
        if place.serves:
            store, _ = rendezvous.serve(place.address, place.port)
        else:
            store = rendezvous.join(place.address, place.port)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._line = StoreLine(PrefixStore(f"mdcs/{attempt}", store))

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        place, line = self.place, self._line
        if place.rank == 0:
            line.say(_END, str(1 if self._exit_code is None else self._exit_code))
            line.follow(f"left/{rank}" for rank in range(1, place.world))
            deadline = time.monotonic() + _LEAVE_SECONDS  # a rank whose host is gone never answers
            while len([key for key in line.heard if key.startswith("left/")]) < place.world - 1 and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
        else:
            line.say(f"left/{place.rank}", "")
        line.close(_LAST_WORDS_SECONDS)

    def leave(self, exit_code: int) -> int:
        """End the program with this exit code (rank 0). Return the exit code."""
        self._exit_code = exit_code
        return exit_code

    def receive(self) -> Handed | int:
        """Wait for the next job (all ranks but 0). Return the exit code of the program when there is none. Raises Gone.
        """
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
        """Run a job on this program's ranks, as `launch.elastic.run` does (rank 0).

        Each rank runs `module` with its own folder and `arguments`. Status, failure reasons and logs of the other ranks
        are in `run_dir` too. All ranks have ended when this call ends, except ranks on a host that is gone: after that,
        every other job ends so at once.
        """
        if self._lost is not None:
            return self._lost
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
            stuck = elastic.watch(run_dir, cluster, agent.poll, on_tick)
            code = agent.poll()
            if (gone := agent.gone()) is not None:
                outcome = self._lost = dataclasses.replace(gone, lost=True)
            else:
                outcome = elastic.outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        finally:
            child.end()
            self._line.say(f"{job.number}/over", json.dumps({"ok": outcome.ok, "reason": outcome.reason}))
            self._line.follow(())
            self._line.flush(_LAST_WORDS_SECONDS)
            self._take_logs(job, run_dir, agent.elsewhere())
        del store  # the ranks use it until here
        return outcome

    def _take_logs(self, job: Handed, run_dir: Path, ranks: Sequence[int]) -> None:
        """Write the logs that the hosts of these ranks send into the folder. A host that is gone sends none."""
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
        """Run this process's rank of a job in `folder`. Return the outcome of the whole job, as rank 0 reports it.

        Raises Gone, with the path of the log.
        """
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
                # After a failure of this rank, half the time is enough: the silent host is probably the cause.
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
    """Key of the store at which a rank writes its status."""
    return f"{job.number}/said/{rank}"


def _log_of(job: Handed, rank: int) -> str:
    """Key of the store at which a rank's log is written after the rank has ended."""
    return f"{job.number}/log/{rank}"


def _end_of(log: Path) -> str:
    """The text of a log, without its beginning if it is long."""
    try:
        with log.open("rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES)
            file.seek(left_out)
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(the log could not be read: {error})\n"
    return f"(the first {left_out} bytes are left out)\n{text}" if left_out else text


class _Child:
    """The process that computes as this rank. Its status is in its folder."""

    def __init__(
        self, member: Membership, folder: Path, job: Handed, env: Mapping[str, str], *, elsewhere: bool = False
    ) -> None:
        self._rank, self._host, self._folder, self._ended = member.place.rank, member.host, folder, False
        self._elsewhere = elsewhere  # the log is on a host that does not see the job's folder: send it
        through = {f"{library}_SOCKET_IFNAME": member.interface for library in ("GLOO", "NCCL") if member.interface}
        command = [sys.executable, "-u", "-m", "launch.rank", str(folder), job.module, str(folder), *job.arguments]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **through,  # before os.environ: a value that the user has set wins
                **os.environ,
                **env,
                **member.place.environment(),
                "MASTER_PORT": str(job.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0's process serves it already
                AGENT_PID: str(os.getpid()),
                "PYTHONPATH": os.pathsep.join(filter(None, [str(elastic.ROOT), os.environ.get("PYTHONPATH")])),
            },
        )

    def poll(self) -> int | None:
        return -signal.SIGTERM if self._ended else self._process.poll()

    def end(self) -> None:
        """Kill the process and all processes that it has started."""
        self._ended = self._process.poll() is None  # killed here: its exit code is no failure of its own
        orphans.kill_groups([self._process.pid])
        self._process.wait()

    def said(self) -> str:
        """The last status of the process, and its exit code once it has ended, as JSON."""
        code = self.poll()  # first: a process that has ended has written its last status by now
        said, error = status.read(self._folder, self._rank), None
        with contextlib.suppress(OSError):
            error = (self._folder / f"rank{self._rank}.error").read_text(encoding="utf-8")
        told = None if said is None else dataclasses.asdict(said)
        return json.dumps({"host": self._host, "status": told, "code": code, "error": error, "elsewhere": self._elsewhere})


class _Ranks:
    """All ranks of a job. Writes the status of the other ranks into the folder."""

    def __init__(self, line: StoreLine, job: Handed, folder: Path, cluster: Cluster, child: _Child) -> None:
        self._line, self._folder, self._cluster, self._child = line, folder, cluster, child
        self.keys = [said_by(job, rank) for rank in range(1, cluster.ranks)]
        self._said: dict[int, dict[str, Any]] = {}
        self._written: dict[int, tuple[Status, float]] = {}
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
        """The outcome if a host has stopped answering, else None."""
        limit = self._cluster.timeout_s / (2 if self._failed else 1)
        silent = {rank: self._line.unchanged(self.keys[rank - 1]) for rank in self._said}
        longest = max(silent, key=silent.__getitem__, default=None)
        if longest is None or silent[longest] <= limit:
            return None
        host = self._said[longest]["host"]
        # The last statuses of its ranks arrive at slightly different times.
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
        if said["status"]:
            self._write(Status(**said["status"]), ended=said["code"] is not None or bool(said["error"]))
        if said == self._said.get(rank):
            return
        self._said[rank] = said
        if said["error"] and not (error := self._folder / f"rank{rank}.error").exists():
            reason_of(self._folder, rank).write(said["error"])
            assert error.exists()
        self._report(rank, said["code"])

    def _write(self, said: Status, *, ended: bool) -> None:
        """Write the status of a rank: its steps at most once a second, its phases and its last status at once."""
        before, when = self._written.get(said.rank, (None, 0.0))
        is_new_phase = before is None or before.phase != said.phase
        if said != before and (ended or is_new_phase or time.monotonic() - when >= _STATUS_SECONDS):
            status.write(self._folder, said)
            self._written[said.rank] = said, time.monotonic()

    def _report(self, rank: int, code: int | None) -> None:
        file = report_of(self._folder, rank)
        if code:
            file.write(json.dumps({"schema": 1, "exit_codes": {rank: code}}))
