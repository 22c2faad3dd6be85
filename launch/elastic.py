"""Run a job's ranks on this machine to their end. A failure ends all ranks quickly, and its reason is reported.

    launcher (this process) → a process that forks ranks (`launch.forks`) → ranks (`launch.rank`)

The process between sees the ranks exit, and kills those that are left when its stdin is closed, so also when this
process ends in any way. This process ends a job in which no rank makes progress, and gives a failing one a moment to
report. Every rank leads its own session, so its children are killed with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch import network, status
from launch.rank import kill_groups, reason_of, report_of
from launch.status import Status

_POLL_SECONDS = 0.1
REPORT_SECONDS = 6.0
"""Seconds that a failing job gets to end by itself, so that the first reason is known, not only the last."""
_WATCHDOG_SECONDS = 4.0
"""Seconds that the watchdog waits beyond a timeout: a rank whose own timeout fires first reports more detail."""

_REASON_CHARACTERS = 600  # the rank's log has the full text
_HAS_WAITED = re.compile(": waited |timed? ?out", re.IGNORECASE)
"""Matches a timeout of the runtime, or of a backend that timed out first."""

_FIRST_HAND = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGXCPU)
"""Deaths that the failure of another rank never causes."""
_SECOND_HAND = (signal.SIGABRT, signal.SIGTERM)
"""Possible consequences: a lost connection can abort a process, and what forked the ranks ends the others."""

LOCK = "launch.lock"
_LOCK_BYTES = 256
_NO_LOCKS = errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP  # NFS without a lock manager, Lustre mounted without flock


class Occupied(RuntimeError):
    """Raised when another job is in the folder. The message is one line that names its process."""


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Hold the lock of a job's folder until the block or this process ends: two jobs would kill each other's ranks.

    The folder is made if it does not exist. Raises Occupied, before it changes anything in it, and OSError where it
    cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when the process ends
        except BlockingIOError:
            holder = os.pread(lock, _LOCK_BYTES, 0).decode(errors="replace") or "another process"
            raise Occupied(f"{folder} is in use by a job of {holder}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warnings.warn(f"{folder}: its file system has no locks, so start no other job there", stacklevel=3)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Cluster:
    """Number of ranks, time limits, and network of a job.

    - timeout_s (s): the job is ended when no rank's status changes for this long.
    - startup_s (s): added to `timeout_s` until every rank has reported a step.
    - rate_gbit (Gbit/s): rate of each rank's link in a shaped cluster of network namespaces (`launch.network`). None:
      all ranks share this machine's loopback.
    - nodes: number of namespaces, with equally many ranks each. None: one rank per namespace.
    """

    ranks: int
    timeout_s: float = 60.0
    startup_s: float = 120.0
    rate_gbit: float | None = None
    nodes: int | None = None


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job, ok if every rank ended well; else the reason in one line, and the place of the first failure.

    - lost: one of several hosts is gone; the job might continue on other hosts.
    - infeasible: the job could not begin, because what it asked for does not fit. Its ranks have ended well.
    """

    ok: bool
    reason: str = ""
    rank: int | None = None
    step: int | None = None
    lost: bool = False
    infeasible: bool = False


OnTick = Callable[[Sequence[Status | None]], None]


def run(
    run_dir: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str] = (),
    on_tick: OnTick = lambda statuses: None,
) -> Outcome:  # fmt: skip
    """Run `module` in `cluster.ranks` processes on this machine, with `env` added to their environment, and wait.

    The caller holds `run_dir` alone (`claim`). The output of each rank goes to `rank{r}.log` in it, that of the process
    that forks them to `agent.log`. `on_tick` is called about ten times a second with the last status of each rank. All
    have ended when this ends, also after an exception from it or Ctrl-C. Raises OSError where the disk is full.
    """
    with Warm(once=True) as ranks:
        return ranks.run(run_dir, cluster, env, module=module, arguments=arguments, on_tick=on_tick)


class Warm(contextlib.AbstractContextManager["Warm"]):
    """Runs jobs like `run`, and faster from the second job on: the process that forks ranks stays until this is left.

    It is started anew after a failed job, and for one with another environment or network. once: no second job follows.
    """

    def __init__(self, *, once: bool = False) -> None:
        self._once = once
        self._made_for: object = None
        self._process: subprocess.Popen[str] | None = None

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(
        self, run_dir: Path, cluster: Cluster, env: Mapping[str, str], *, module: str, arguments: Sequence[str] = (),
        on_tick: OnTick = lambda statuses: None,
    ) -> Outcome:  # fmt: skip
        run_dir = run_dir.resolve()
        clear(run_dir)
        # What the processes of a job write when they end: the exit codes of failed ranks, and their reasons.
        reserved = [report_of(run_dir, 0), *(reason_of(run_dir, rank) for rank in range(cluster.ranks))]
        for file in reserved:
            file.take()  # now: a full disk is an error that can still be reported here
        outcome = Outcome(False, "interrupted")
        try:
            process = self._hand(run_dir, cluster, env, module, arguments)

            def poll() -> int | None:
                try:
                    report = _read(report_of(run_dir, 0).path)
                except FileNotFoundError:
                    return process.poll()
                return int(bool(report["exit_codes"]))

            stuck = watch(run_dir, cluster, poll, on_tick)
            code = poll()
            outcome = outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        finally:
            if self._once or not outcome.ok:
                self._end()
            said = (status.read(run_dir, rank) for rank in range(cluster.ranks))
            kill_groups(each.pid for each in said if each is not None)  # if the process between was killed
            for unused in reserved:
                unused.give_back()
        return outcome

    def _hand(
        self, folder: Path, cluster: Cluster, env: Mapping[str, str], module: str, arguments: Sequence[str]
    ) -> subprocess.Popen[str]:
        """Start a job. Return the process that forks its ranks."""
        nodes = 1 if cluster.rate_gbit is None else cluster.nodes or cluster.ranks
        made_for = (dict(env), cluster.rate_gbit, nodes)
        interface = "lo" if cluster.rate_gbit is None else network.INTERFACE
        through = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        if self._process is None or self._process.poll() is not None or self._made_for != made_for:
            self._end()
            self._made_for = made_for
            paths = os.pathsep.join(filter(None, [str(network.ROOT), os.environ.get("PYTHONPATH")]))
            with (folder / "agent.log").open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "launch.forks"],
                    stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
                    start_new_session=True,  # Ctrl-C reaches this process alone; it then ends the others
                    env={**os.environ, **through, **env, "PYTHONPATH": paths},
                )  # fmt: skip
        job = {
            "schema": 1, "folder": str(folder), "ranks": cluster.ranks, "nodes": nodes, "rate_gbit": cluster.rate_gbit,
            "module": module, "arguments": list(arguments), "once": self._once, "env": through | dict(env),
        }  # fmt: skip
        (folder / "launch.json").write_text(json.dumps(job, indent=1), encoding="utf-8")
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended; its exit code reports it
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return self._process

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(REPORT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel kills the ranks with it
            process.wait()


def watch(run_dir: Path, cluster: Cluster, poll: Callable[[], int | None], on_tick: OnTick) -> str | None:
    """Wait until the ranks end or have to be ended. Return a reason only when no rank makes progress, else None.

    poll: returns None while the ranks run, 0 once all have ended well, and another number when one has failed.
    """
    last: list[Status | None] = [None] * cluster.ranks
    moved, failed = time.monotonic(), None
    while poll() is None:
        now = time.monotonic()
        statuses = [status.read(run_dir, rank) for rank in range(cluster.ranks)]
        if statuses != last:
            last, moved = statuses, now
        on_tick(statuses)
        if any((run_dir / f"rank{rank}.error").exists() for rank in range(cluster.ranks)):
            failed = failed or now
            if now - failed > REPORT_SECONDS:
                return None
        started = all(said is not None and said.step > 0 for said in statuses)
        limit = cluster.timeout_s + (0 if started else cluster.startup_s)
        if failed is None and now - moved > limit + _WATCHDOG_SECONDS:
            where = ", ".join(_where(rank, said) for rank, said in enumerate(statuses))
            return f"no rank has moved for {limit:g} s: {where}"
        time.sleep(_POLL_SECONDS)
    on_tick([status.read(run_dir, rank) for rank in range(cluster.ranks)])
    return None


def clear(run_dir: Path) -> None:
    """Move the files of an earlier job in the folder to `attempts/N`: their pids may be other processes' by now."""
    run_dir.mkdir(parents=True, exist_ok=True)
    patterns = ("rank*.status", "rank*.error", "rank*.log", "agent*.json", "agent.log")
    if left := [file for pattern in patterns for file in run_dir.glob(pattern)]:
        attempts = (run_dir / "attempts" / str(number) for number in itertools.count(1))
        kept = next(each for each in attempts if not each.exists())
        kept.mkdir(parents=True)
        for file in left:
            file.rename(kept / file.name)


def outcome_of(run_dir: Path, cluster: Cluster, agent_code: int, stuck: str | None) -> Outcome:
    """Return the outcome that follows from the files of a job's processes in its folder."""
    errors = [_read(file) for file in run_dir.glob("rank*.error")]
    # By time, but one that reports the exit of another rank comes after the others.
    errors.sort(key=lambda error: (" left the run in step " in error["message"], error["time"]))
    reports = [_read(file) for file in run_dir.glob("agent*.json")]
    codes = {int(rank): code for report in reports for rank, code in report["exit_codes"].items()}
    explained = {error["rank"] for error in errors}
    if agent_code == 0 and not errors:
        return Outcome(ok=True)
    for rank, code in sorted(codes.items()):
        if -code in _FIRST_HAND or (code > 0 and rank not in explained):
            return _died(run_dir, rank, code)
    if errors:
        first = errors[0]
        words = " ".join(first["message"].split())
        words = words if len(words) <= _REASON_CHARACTERS else words[:_REASON_CHARACTERS] + " …"
        where = _at(first["step"], first["phase"])
        reason = f"rank {first['rank']} failed {where}: {words}{_silent(run_dir, cluster, first)}"
        return Outcome(False, reason, first["rank"], first["step"])
    if stuck is not None:
        said = (status.read(run_dir, rank) for rank in range(cluster.ranks))
        steps = [-1 if each is None else each.step for each in said]
        return Outcome(False, stuck, steps.index(min(steps)), min(steps))
    if codes:
        rank = min(codes, key=lambda each: (*(codes[each] != -number for number in _SECOND_HAND), each))
        return _died(run_dir, rank, codes[rank])
    return Outcome(False, f"the launcher's agent ended with {agent_code}: {_last_line(run_dir / 'agent.log')}")


def _silent(run_dir: Path, cluster: Cluster, error: dict[str, Any]) -> str:
    """Name the ranks at the lowest step whose status has not changed for half of the timeout; empty if the failed rank
    did not wait for others, or if that step is more than one ahead of it."""
    if not _HAS_WAITED.search(error["message"]):
        return ""
    said = [status.read(run_dir, rank) for rank in range(cluster.ranks) if not (run_dir / f"rank{rank}.error").exists()]
    mute = [each for each in said if each is not None and error["time"] - each.time >= cluster.timeout_s / 2]
    least = min((each.step for each in mute), default=error["step"] + 2)
    if least > error["step"] + 1:  # a rank may be one step ahead
        return ""
    who = [each for each in mute if each.step == least]
    ranks = f"rank {who[0].rank}" if len(who) == 1 else f"ranks {', '.join(str(each.rank) for each in who)}"
    return f"; {ranks} reported nothing for {min(error['time'] - each.time for each in who):.0f} s, since step {least}"


def _died(run_dir: Path, rank: int, code: int) -> Outcome:
    said = status.read(run_dir, rank)
    where = _at(said.step, said.phase) if said else "before it started"
    names = {each.value: each.name for each in signal.Signals}
    how = f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exited with {code}"
    hint = f": {_last_line(run_dir / 'agent.log')}" if said is None and code > 0 else ""
    return Outcome(False, f"rank {rank} {how} {where}{hint}", rank, said.step if said else None)


def _at(step: int, phase: str) -> str:
    return f"at step {step}" if step else f"before step 1 ({phase})"


def _where(rank: int, said: Status | None) -> str:
    return f"rank {rank} has not started" if said is None else f"rank {rank} at step {said.step} ({said.phase})"


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1].strip() if lines else "it said nothing"


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))
