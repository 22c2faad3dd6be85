"""Jobs whose ranks torchrun or srun has started, on any number of hosts (`launch.place`): rank 0's part.

    torchrun or srun → the program → rank 0 (`launch.rank`)
                     → each other rank (`launch.serving`)

The process that was started as rank 0 runs the program, and starts rank 0 for each job. Every other process is its
rank. The program hands out jobs, receives the status of all ranks, and judges how a job ends, as `launch.elastic` does
on one machine.

The processes share a store and need no shared files. Each rank's last status and exit code are written to the store
several times a second, so a host is lost when it stops writing, whatever its connections look like. A rank's log is
written in the job's folder where its host sees the folder; elsewhere it is sent there after the rank has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore

from launch import elastic, orphans, rendezvous, status
from launch.elastic import REPORT_SECONDS, Cluster, OnTick, Outcome
from launch.place import Place, interface
from launch.preemption import Terminated
from launch.rank import AGENT_PID, reason_of, report_of
from launch.status import Status
from launch.store_line import StoreLine

_POLL_SECONDS = 0.1
_STATUS_SECONDS = 1.0
"""Least time between two writes of a running rank's status to the job's folder, whose file system may be shared."""
_LAST_WORDS_SECONDS = 2.0
END = "end"
"""Key of the store at which the program's exit code is written."""
_SILENT_SECONDS = 3.0
"""Silence by which a process that has ended is told from one that runs, once it is known that one has failed."""
_LOG_SECONDS = 5.0
_LEAVE_SECONDS = 60.0
"""Seconds for a rank that starts anew, to hear of the end. The store may be this process's."""
_SEEN = "launch.json"


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

    def said_by(self, rank: int) -> str:
        """Key of the store at which a rank writes its status."""
        return f"{self.number}/said/{rank}"

    def log_of(self, rank: int) -> str:
        """Key of the store at which a rank's log is written after the rank has ended."""
        return f"{self.number}/log/{rank}"


class Member:
    """This process among those of a program: its place, its network interface, its line to the store.

    Raises `launch.place.NoPlace` where the other ranks cannot be reached.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.interface, self.address = interface(place)
        self.host = f"{socket.gethostname()} ({self.address})"
        if place.serves:
            store, _ = rendezvous.serve(place.address, place.port)
        else:
            store = rendezvous.join(place.address, place.port)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.line = StoreLine(PrefixStore(f"mdcs/{attempt}", store))

    def environment(self, port: int) -> dict[str, str]:
        """Variables of this process's rank in a job whose store is at `port`."""
        through = (f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL") if self.interface)
        return {
            **{key: os.environ.get(key, self.interface) for key in through},  # a value that the user has set wins
            **self.place.environment(),
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the program serves it already
            AGENT_PID: str(os.getpid()),
        }


class Membership(Member):
    """Rank 0's part in all jobs of a program, as a context manager.

    When the block is left, the program ends on all ranks with `exit_code`.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.exit_code = 1
        self._lost: Outcome | None = None
        self._number = 0

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.say(END, str(self.exit_code))
        left = [f"left/{rank}" for rank in range(1, self.place.world)]
        self._hear(left, _LEAVE_SECONDS if self._lost is None else 0.0)
        self.line.close(_LAST_WORDS_SECONDS)

    def run(
        self, run_dir: Path, cluster: Cluster, env: Mapping[str, str], *, payload: str, module: str,
        arguments: Sequence[str] = (), on_tick: OnTick = lambda statuses: None,
    ) -> Outcome:  # fmt: skip
        """Run a job on this program's ranks, as `launch.elastic.run` does.

        Each rank runs `module` with its own folder and `arguments`. Status, failure reasons and logs of the other ranks
        are in `run_dir` too. All ranks have ended, or been told to, when this call ends. After the process of a rank or
        its host is gone, every other job ends so at once.
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
        child = _start(run_dir, job, {**env, **self.environment(port)})
        ranks = _Ranks(self.line, job, run_dir, cluster, child)
        self.line.follow(ranks.keys)
        self.line.say(f"{job.number}/job", json.dumps(dataclasses.asdict(job)))
        outcome = Outcome(False, "interrupted")
        try:
            stuck = elastic.watch(run_dir, cluster, ranks.poll, on_tick)
            code = ranks.poll()
            self._lost = ranks.gone()
            outcome = self._lost or elastic.outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        except Terminated:
            deadline = time.monotonic() + _SILENT_SECONDS + 1
            while (gone := ranks.gone(ending=True)) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                ranks.poll()
            if gone is None:
                raise
            outcome = self._lost = gone
        finally:
            orphans.kill_groups([child.pid])  # with all that it has started
            child.wait()
            self.line.say(f"{job.number}/over", "")
            self.line.follow(())
            self.line.flush(_LAST_WORDS_SECONDS)
            self._take_logs(job, run_dir, ranks.elsewhere())
        del store  # the ranks use it until here
        return outcome

    def _take_logs(self, job: Handed, run_dir: Path, ranks: Sequence[int]) -> None:
        """Write the logs that the hosts of these ranks send into the folder. A host that is gone sends none."""
        self._hear([job.log_of(rank) for rank in ranks], _LOG_SECONDS)
        for rank in ranks:
            if (text := self.line.heard.pop(job.log_of(rank), None)) is not None:
                with contextlib.suppress(OSError):
                    (run_dir / f"rank{rank}.log").write_text(text, encoding="utf-8")

    def _hear(self, keys: Sequence[str], seconds: float) -> None:
        """Wait until all of these keys are in the store."""
        self.line.follow(keys)
        deadline = time.monotonic() + seconds
        while any(key not in self.line.heard for key in keys) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self.line.follow(())


def _start(folder: Path, job: Handed, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process of rank 0."""
    paths = os.pathsep.join(filter(None, [str(elastic.ROOT), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "launch.rank", str(folder), job.module, str(folder), *job.arguments],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, **env, "PYTHONPATH": paths},
    )


class _Ranks:
    """All ranks of a job. Writes the status of the other ranks into the folder."""

    def __init__(
        self, line: StoreLine, job: Handed, folder: Path, cluster: Cluster, child: subprocess.Popen[bytes]
    ) -> None:
        self._line, self._folder, self._cluster, self._child = line, folder, cluster, child
        self.keys = [job.said_by(rank) for rank in range(1, cluster.ranks)]
        self._said: dict[int, dict[str, Any]] = {}
        self._written: dict[int, tuple[Status, float]] = {}
        self._failed: float | None = None
        self._begun = time.monotonic()

    def poll(self) -> int | None:
        """Return None while the ranks run, 0 once all have ended well, and 1 once it is known why one has failed."""
        for rank, key in enumerate(self.keys, 1):
            if (heard := self._line.heard.get(key)) is not None:
                self._leave(rank, json.loads(heard.partition(" ")[2]))
        codes = [self._child.poll(), *(self._said.get(rank, {}).get("code") for rank in range(1, self._cluster.ranks))]
        if all(code == 0 for code in codes):
            return 0
        if any(codes) and self._failed is None:
            self._failed = time.monotonic()
        self._report(0, codes[0])
        is_known = self._failed is not None and (None not in codes or time.monotonic() - self._failed > REPORT_SECONDS)
        return 1 if is_known or self.gone() else None

    def gone(self, *, ending: bool = False) -> Outcome | None:
        """The outcome if a host has stopped answering, or a rank's process has ended without a word; else None.

        ending: somebody ends this process, which is what happens to the other ranks when the process of one has ended.
        """
        silent = {
            rank: self._line.unchanged(self.keys[rank - 1]) for rank, said in self._said.items() if said["code"] is None
        }
        longest = max(silent, key=silent.__getitem__, default=None)
        unheard = next((rank for rank in range(1, self._cluster.ranks) if rank not in self._said), None)
        if ending and unheard and time.monotonic() - self._begun > _SILENT_SECONDS:
            return Outcome(False, f"the process of rank {unheard} ended without a word, before it started", unheard)
        if longest is None:
            return None
        host, limit = self._said[longest]["host"], self._cluster.timeout_s / (2 if self._failed else 1)
        if silent[longest] > limit:
            # The last statuses of its ranks arrive at slightly different times.
            gone = [rank for rank in sorted(silent) if self._said[rank]["host"] == host and silent[rank] > limit / 2]
            reason = f"host {host} has not answered for {silent[longest]:.0f} s: {', '.join(map(self._where, gone))}"
            return Outcome(False, reason, gone[0], self._step(gone[0]), lost=True)
        is_due = ending or self._failed is not None and time.monotonic() - self._failed > REPORT_SECONDS
        if is_due and silent[longest] > _SILENT_SECONDS:
            reason = f"the process of rank {longest} on host {host} ended without a word: {self._where(longest)}"
            return Outcome(False, reason, longest, self._step(longest))
        return None

    def elsewhere(self) -> list[int]:
        """The ranks whose logs are on other hosts."""
        return [rank for rank, said in self._said.items() if said.get("elsewhere")]

    def _step(self, rank: int) -> int | None:
        return (self._said[rank]["status"] or {}).get("step")

    def _where(self, rank: int) -> str:
        said = self._said[rank]["status"]
        return f"rank {rank} was at step {said['step']} ({said['phase']})" if said else f"rank {rank} had not started"

    def _leave(self, rank: int, said: dict[str, Any]) -> None:
        if said["status"]:
            self._write(Status(**said["status"]), ended=said["code"] is not None or bool(said["error"]))
        if said == self._said.get(rank):
            return
        self._said[rank] = said
        if said["error"] and not (self._folder / f"rank{rank}.error").exists():
            reason_of(self._folder, rank).write(said["error"])
        self._report(rank, said["code"])

    def _write(self, said: Status, *, ended: bool) -> None:
        """Write the status of a rank: its steps at most once a second, its phases and its last status at once."""
        before, when = self._written.get(said.rank, (None, 0.0))
        is_new_phase = before is None or before.phase != said.phase
        if said != before and (ended or is_new_phase or time.monotonic() - when >= _STATUS_SECONDS):
            status.write(self._folder, said)
            self._written[said.rank] = said, time.monotonic()

    def _report(self, rank: int, code: int | None) -> None:
        if code:
            report_of(self._folder, rank).write(json.dumps({"schema": 1, "exit_codes": {rank: code}}))
