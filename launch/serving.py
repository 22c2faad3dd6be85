"""Jobs whose ranks torchrun or srun has started (`launch.joined`): the part of every rank but the first, one process
each.

The rank runs in the main thread. A second thread talks to the store (`launch.store_line`), and a third ends the rank
when the program says so or when the host of rank 0 is gone: both also work while the main thread waits in a collective.
If the main thread keeps the interpreter's lock, so that they cannot, faulthandler ends the process.

Before each job the process has exec start it anew, unless it is new and has the job's environment: settings of the
allocator and of threads are read when a process starts, and a job is to find nothing of the last one. torchrun and srun
see one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch import elastic, orphans, preemption, rank, status
from launch.place import Place

if TYPE_CHECKING:
    from launch.joined import Handed, Member  # torch takes seconds

_STATE = "MDCS_RANK"
_ANSWER_SECONDS = 60.0
"""Seconds that the host of rank 0 may be silent between jobs."""
_ARM_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LAST_WORDS_SECONDS = 2.0
_LOG_BYTES = 256 << 10
"""Only the last bytes of a log are sent, up to this number: the store keeps them in memory."""


Prepare = Callable[[Path, str, Mapping[str, str]], Mapping[str, str]]
"""(folder, payload, environment of the process) → variables that a job's ranks have in addition. Writes the job's
files."""


class Gone(RuntimeError):
    """The host of rank 0 does not answer. The message is one line with the host and the place of this rank."""


class Server:
    """The process of a rank.

    - again: the arguments of Python with which exec starts this process anew; they lead to `serve`.
    - added, number: variables that the environment has for the next job, and its number; None before the first exec.
    - environment: that of the process as torchrun or srun has started it.
    """

    def __init__(self, again: Sequence[str]) -> None:
        self._again = list(again)
        said = json.loads(os.environ.pop(_STATE, "{}"))
        self.added: dict[str, str] | None = said.get("added")
        self.number: int = said.get("number", 0)
        before = said.get("before", {})
        self.environment = {key: value for key, value in (dict(os.environ) | before).items() if value is not None}

    def start_again(self, added: Mapping[str, str], number: int) -> NoReturn:
        """Replace this process by a new one with `added` in its environment, which waits for the job `number`.

        May be called by any thread. All that this process has started is killed, and its connections are closed.
        """
        paths = os.pathsep.join(filter(None, [str(elastic.ROOT), self.environment.get("PYTHONPATH")]))
        before = {key: self.environment.get(key) for key in ("PYTHONPATH", *added)}
        state = json.dumps({"added": dict(added), "before": before, "number": number})
        orphans.kill_descendants()
        for file in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                os.set_inheritable(int(file), int(file) < 3)
        environment = {**self.environment, **added, "PYTHONPATH": paths, _STATE: state}
        os.execve(sys.executable, [sys.executable, "-u", *self._again], environment)

    def serve(self, place: Place, prepare: Prepare) -> int:
        """Run jobs as this rank until the program ends. Return its exit code. Raises Gone, and NoPlace as `Member`
        does.
        """
        _ignore_signals()
        orphans.die_with_parent(os.getppid())
        from launch.joined import END, Handed, Member  # torch takes seconds

        member = Member(place)
        line, key, is_new = member.line, f"{self.number}/job", True
        while True:
            line.follow((key, END))
            while key not in line.heard:
                if END in line.heard:
                    line.say(f"left/{place.rank}", "")
                    line.close(_LAST_WORDS_SECONDS)
                    return int(line.heard[END])
                require_answer(member, _ANSWER_SECONDS, None)
                time.sleep(_POLL_SECONDS)
            said = json.loads(line.heard[key])
            job = Handed(**said | {"arguments": tuple(said["arguments"])})
            folder = Path(tempfile.mkdtemp(prefix=_prefix()))
            added = dict(prepare(folder, job.payload, self.environment))
            if not is_new or added != self.added:
                shutil.rmtree(folder)
                self.start_again(added, job.number)
            code = _Job(self, member, job, folder).run()
            _ignore_signals()
            if code:
                self.start_again(added, job.number + 1)  # at once: the other ranks see its connections close
            is_new, key = False, f"{job.number + 1}/job"


def _prefix() -> str:
    """Prefix of the name of this rank's folder. SLURM's task epilog (`hydra_plugins.mdcs_slurm`) removes what a killed
    one left.
    """
    names = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"
    return f"mdcs-rank-{'.'.join(os.environ.get(name, '') for name in names)}-"


def _ignore_signals() -> None:
    """Leave signals to the program, which hears them, too, and ends this process when it is through."""
    for each in (signal.SIGTERM, signal.SIGINT, *(preemption.SIGNALS if preemption.expected() else ())):
        signal.signal(each, signal.SIG_IGN)


class _Job:
    """One job of this rank, in a folder that is removed afterwards unless the host of rank 0 is gone."""

    def __init__(self, server: Server, member: Member, job: Handed, folder: Path) -> None:
        self._server, self._member, self._job, self._folder = server, member, job, folder
        self._log = folder / f"rank{member.place.rank}.log"
        self._elsewhere = not job.is_seen
        if not self._elsewhere:
            self._log.symlink_to(Path(job.folder) / self._log.name)
        self._key, self._over = job.said_by(member.place.rank), f"{job.number}/over"
        self._output = [os.dup(stream) for stream in (1, 2)]
        self._code: int | None = None
        self._has_ended = threading.Event()

    def run(self) -> int:
        """Run the rank. Return its exit code."""
        member, job = self._member, self._job
        os.environ |= (self._server.added or {}) | member.environment(job.port)
        member.line.follow((self._over,))
        member.line.say_always(self._key, self._said)
        guard = threading.Thread(target=self._guard, name="guard", daemon=True)
        guard.start()
        self._code = rank.main(self._folder, job.module, [str(self._folder), *job.arguments])
        while self._code and time.monotonic() - member.line.answered > _LAST_WORDS_SECONDS:
            time.sleep(_POLL_SECONDS)  # the host of rank 0 may be the cause; then the guard ends this process
        self._has_ended.set()
        guard.join()
        self._leave()
        return self._code

    def _guard(self) -> None:
        job, armed = self._job, 0.0
        try:
            while not self._has_ended.wait(_POLL_SECONDS):
                if self._over in self._member.line.heard:
                    faulthandler.dump_traceback()  # into the log: where this rank is
                    self._leave()
                    self._server.start_again(self._server.added or {}, job.number + 1)
                if time.monotonic() - armed > _ARM_SECONDS:
                    faulthandler.dump_traceback_later(job.timeout_s + _ARM_SECONDS, exit=True)
                    armed = time.monotonic()
                # After a failure of this rank, half the time is enough: the silent host is probably the cause.
                limit = job.timeout_s / (2 if self._code else 1)
                require_answer(self._member, limit, status.read(self._folder, self._member.place.rank))
        except Gone as error:
            text = f"rank {self._member.place.rank}: {error}; its log is {self._log.resolve()}\n"
            os.write(self._output[1], text.encode())
            os._exit(1)

    def _leave(self) -> None:
        """Say the last that is to be said of this job, and remove its folder."""
        line, last = self._member.line, self._said()
        faulthandler.cancel_dump_traceback_later()
        for stream, was in enumerate(self._output, 1):
            os.dup2(was, stream)
            os.close(was)
        line.say_always(self._key, lambda: last)
        if self._elsewhere:
            line.say(self._job.log_of(self._member.place.rank), end_of(self._log))
        line.flush(_LAST_WORDS_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _said(self) -> str:
        """The last status of this rank, and its exit code once it has ended, as JSON."""
        code = self._code  # first: a rank that has ended has written its last status by now
        said, error = status.read(self._folder, self._member.place.rank), None
        with contextlib.suppress(OSError):
            error = (self._folder / f"rank{self._member.place.rank}.error").read_text(encoding="utf-8")
        told = None if said is None else dataclasses.asdict(said)
        return json.dumps(
            {"host": self._member.host, "status": told, "code": code, "error": error, "elsewhere": self._elsewhere}
        )


def require_answer(member: Member, seconds: float, said: status.Status | None) -> None:
    """Raise Gone if the store has not answered for longer than `seconds`."""
    silent = time.monotonic() - member.line.answered
    if silent > seconds:
        where = "" if said is None else f"; rank {said.rank}, on {member.host}, was at step {said.step} ({said.phase})"
        raise Gone(f"host {member.place.address}, that of rank 0, has not answered for {silent:.0f} s{where}")


def end_of(log: Path) -> str:
    """The text of a log, without its beginning if it is long."""
    try:
        with log.open("rb") as file:
            left_out = max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES)
            file.seek(left_out)
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(the log could not be read: {error})\n"
    return f"(the first {left_out} bytes are left out)\n{text}" if left_out else text
