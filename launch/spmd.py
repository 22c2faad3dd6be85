"""Ranks that torchrun or srun has started on any number of hosts: one process each, which is the rank in every job.

The main thread of every process runs the rank (`launch.rank`). In the process of rank 0 a second thread runs the
program, which decides on the jobs and judges how they end, as `launch.elastic` does on one machine.

Each process writes its record to a store that all share (`launch.rendezvous`), several times a second, and reads that
of rank 0, or rank 0 those of all. So a host is lost when it stops writing, whatever its connections look like, and no
files need be shared: a rank's log is written in the job's folder where its host sees the folder, and sent there after
the rank has ended elsewhere. After a job that some rank cannot leave there are no others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

from launch import elastic, preemption, rank, rendezvous, status
from launch.elastic import Cluster, OnTick, Outcome
from launch.place import Place, interface
from launch.preemption import Terminated
from launch.rank import AGENT_PID
from launch.rendezvous import SILENT_SECONDS, TALK_SECONDS, Beat, Watched, end_of

_POLL_SECONDS = 0.1
_IDLE_SECONDS = 60.0
"""Seconds that the host of rank 0 may be silent between jobs."""
_LEAVE_SECONDS, _LAST_WORDS_SECONDS, _ARM_SECONDS = 5.0, 2.0, 5.0
_SEEN = "launch.json"

Prepare = Callable[[Path, str], Mapping[str, str]]
"""(folder, payload) → variables that a job's rank has in its environment. Writes the job's files on another rank."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job as rank 0 says it: its number (from 0), the program's own description (`payload`), what each rank runs, and
    the port of the store. `folder` is that on rank 0's host; a host that finds `token` in it sees the same one."""

    number: int
    payload: str
    module: str
    arguments: Sequence[str]
    timeout_s: float
    port: int
    folder: str
    token: str

    @property
    def is_seen(self) -> bool:
        """Whether this host sees the job's folder."""
        try:
            return json.loads((Path(self.folder) / _SEEN).read_text(encoding="utf-8")).get("id") == self.token
        except (OSError, ValueError):
            return False


class Ranks:
    """Ranks of a program, seen from this process. Raises `launch.place.NoPlace` where the others cannot be reached."""

    def __init__(self, place: Place, prepare: Prepare) -> None:
        self.place = place
        self.interface, address = interface(place)
        self.host = f"{socket.gethostname()} ({address})"
        self.job: Job | None = None  # that the main thread runs, or ran last
        self.code: int | None = None  # exit code of this rank in it, once it has ended
        self._folder, self._prepare = Path(), prepare
        self._lead: dict[str, Any] = {}  # what rank 0 says: the job, the last one that is over, the exit code
        self._left, self._number = False, 0
        self._lost: Outcome | None = None
        self._signals = _Signals(place.rank)
        where = place.address, place.port
        store = rendezvous.serve(*where)[0] if place.serves else rendezvous.join(*where)
        self.store = dist.PrefixStore(f"mdcs/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        others = range(1, place.world) if place.rank == 0 else [0]
        self.beat = Beat(self.store, place.rank, others, self._said)
        self.beat.start()

    # ---- every rank

    def serve(self, program: Callable[[], int] | None = None) -> int:
        """Run this rank in all jobs until the program ends. Return the program's exit code, the same on all ranks.

        program: of rank 0; run in a thread of its own.
        """
        rank.die_with_parent(os.getppid())
        thread = threading.Thread(target=self._run_program if program else self._guard, args=filter(None, [program]))
        thread.daemon = True
        with _streams_by_thread() if program else contextlib.nullcontext():
            thread.start()
            done = -1
            while "end" not in (lead := self.lead):
                if (told := lead.get("job")) is not None and told["number"] > done:
                    done = told["number"]
                    self._run_job(Job(**told))
                elif program and (number := self._signals.arrived()):
                    self._end(128 + number)
                time.sleep(_POLL_SECONDS)
            thread.join(_LEAVE_SECONDS if program else 0)
            return self._leave(int(lead["end"]))

    @property
    def lead(self) -> dict[str, Any]:
        """Return the message of rank 0."""
        return self._lead if self.place.rank == 0 else self.beat.heard.get(0, {})

    def _said(self) -> dict[str, Any]:
        if self.place.rank == 0:
            return self._lead
        job, code, error = self.job, self.code, None  # the code first: a rank that has ended has written its status
        known = None if job is None else status.read(self._folder, self.place.rank)
        with contextlib.suppress(OSError):
            error = (self._folder / f"rank{self.place.rank}.error").read_text(encoding="utf-8")
        return {
            "host": self.host, "job": job and job.number, "status": known and dataclasses.asdict(known), "code": code,
            "error": error, "elsewhere": job is not None and not job.is_seen, "left": self._left,
        }  # fmt: skip

    def _run_job(self, job: Job) -> None:
        own, first = self.place.rank, self.place.rank == 0
        folder = Path(job.folder) if first else Path(tempfile.mkdtemp(prefix=_prefix()))
        if not first and job.is_seen:
            (folder / f"rank{own}.log").symlink_to(Path(job.folder) / f"rank{own}.log")
        through = (f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL") if self.interface)
        os.environ |= {
            **self._prepare(folder, job.payload),
            **{key: os.environ.get(key, self.interface) for key in through},  # a value that the user has set wins
            **self.place.environment(), "MASTER_PORT": str(job.port), AGENT_PID: str(os.getpid()),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # the program serves it already
        }  # fmt: skip
        self.code, self._folder, self.job = None, folder, job
        output, arguments = [os.dup(stream) for stream in (1, 2)], sys.argv
        self.code = rank.main(folder, job.module, [str(folder), *job.arguments])
        with contextlib.suppress(Exception):
            if self.code and dist.is_initialized():
                dist.destroy_process_group()
        gc.collect()  # what a job leaves would be in the peak of the next
        sys.argv = arguments
        for stream, was in enumerate(output, 1):
            os.dup2(was, stream)
            os.close(was)
        if not first:
            self._send_log(job)
            while "end" not in self.lead and self.lead.get("over", -1) < job.number:
                time.sleep(_POLL_SECONDS)  # its last status is read
            shutil.rmtree(folder, ignore_errors=True)
        self._signals.restore()

    def _send_log(self, job: Job) -> None:
        if not job.is_seen:
            self.store.set(f"log/{job.number}/{self.place.rank}", end_of(self._folder / f"rank{self.place.rank}.log"))

    def _guard(self) -> None:
        """Thread of a rank but the first: ends the process where the main thread cannot, in a job that is over, and
        without rank 0."""
        armed, shown = 0.0, -1
        while not self._left:
            job, lead = self.job, self.lead
            running = job if self.code is None else None
            if running is not None and (lead.get("over", -1) >= running.number or "end" in lead):
                if shown < running.number:
                    faulthandler.dump_traceback(file=2)  # into the log: where this rank is
                    self._send_log(running)
                    shown = running.number
                if "end" in lead:
                    os._exit(self._leave(int(lead["end"])))
            if running is None:
                faulthandler.cancel_dump_traceback_later()
            elif time.monotonic() - armed > _ARM_SECONDS:
                faulthandler.dump_traceback_later(running.timeout_s + _ARM_SECONDS, exit=True)
                armed = time.monotonic()
            # After a failure of this rank, half the time is enough: the silent host is probably the cause.
            silent, limit = time.monotonic() - self.beat.answered, _IDLE_SECONDS
            if job is not None:
                limit = job.timeout_s / (2 if self.code else 1)
            if silent > limit:
                own, first = self.place.rank, self.place.address
                known = None if job is None else status.read(self._folder, own)
                where = "" if known is None else f"; on {self.host} it was at step {known.step} ({known.phase})"
                text = f"rank {own}: host {first}, that of rank 0, has not answered for {silent:.0f} s{where}\n"
                os.write(self._signals.stderr, text.encode())
                os._exit(1)
            time.sleep(_POLL_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def _leave(self, code: int) -> int:
        """Say that this process ends, or wait for the others to say so."""
        self._left = True
        deadline = time.monotonic() + (_LEAVE_SECONDS if self._lost is None else _LAST_WORDS_SECONDS)
        last, others = self.beat.rounds + 2, range(1, self.place.world) if self.place.rank == 0 else ()
        while time.monotonic() < deadline:
            if all(self.beat.heard.get(each, {}).get("left") for each in others) and self.beat.rounds >= last:
                break
            time.sleep(TALK_SECONDS)
        self.beat.close()
        return code

    # ---- rank 0

    def _run_program(self, program: Callable[[], int]) -> None:
        """Thread of rank 0: runs the program, and ends the process where the main thread is in a job that is over."""
        code = 1
        try:
            code = program()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except BaseException:
            traceback.print_exc()
        self._end(code)

    def _end(self, code: int) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        self._lead = {**self._lead, "end": code}
        if self.job is not None and self.code is None:
            os._exit(self._leave(code))

    def run(
        self, run_dir: Path, cluster: Cluster, *, payload: str, module: str,
        arguments: Sequence[str] = (), on_tick: OnTick = lambda statuses: None,
    ) -> Outcome:  # fmt: skip
        """Run a job on these ranks, as `launch.elastic.run` does; called by the program.

        Each rank runs `module` with its own folder and `arguments`. Status, failure reasons and logs of all ranks are
        in `run_dir`. Where a rank, its process or its host has not ended the job, every later job ends so at once.
        """
        if self._lost is not None:
            return self._lost
        run_dir = run_dir.resolve()
        elastic.clear(run_dir)
        store, port = rendezvous.serve(self.place.address)
        token = uuid.uuid4().hex
        job = Job(self._number, payload, module, arguments, cluster.timeout_s, port, str(run_dir), token)
        about = {"schema": 1, "id": token, "ranks": cluster.ranks, "module": module, "arguments": list(arguments)}
        (run_dir / _SEEN).write_text(json.dumps(about, indent=1), encoding="utf-8")
        self._number += 1
        self.code, self.job = None, job
        ranks = Watched(self.beat, lambda: self.code, job.number, run_dir, cluster)
        self._lead = {**self._lead, "job": dataclasses.asdict(job)}

        def poll() -> int | None:
            if number := self._signals.arrived():
                raise Terminated if number == signal.SIGTERM else KeyboardInterrupt
            return ranks.poll()

        try:
            stuck = elastic.watch(run_dir, cluster, poll, on_tick)
            code = ranks.poll()
            outcome = ranks.gone() or elastic.outcome_of(run_dir, cluster, 1 if code is None else code, stuck)
        except Terminated:
            deadline = time.monotonic() + SILENT_SECONDS + 1
            while (gone := ranks.gone(ending=True)) is None and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                ranks.poll()
            if gone is None:
                raise
            outcome = gone
        finally:
            if self.code is None:
                with contextlib.suppress(OSError), (run_dir / "rank0.log").open("a") as log:
                    faulthandler.dump_traceback(file=log)
            self._lead = {**self._lead, "over": job.number}
            self._take_logs(job, run_dir, ranks.elsewhere())
            if not ranks.ended():
                self._lost = Outcome(False, "an earlier job has not ended on all ranks")
        del store  # the ranks use it until here
        self._lost = self._lost and outcome
        return outcome

    def _take_logs(self, job: Job, run_dir: Path, ranks: Sequence[int]) -> None:
        """Write into the folder the logs that the hosts of these ranks send; one that is gone sends none."""
        left, deadline = set(ranks), time.monotonic() + _LEAVE_SECONDS
        while left and time.monotonic() < deadline and time.monotonic() - self.beat.answered < SILENT_SECONDS:
            for each in [one for one in left if self.store.check([f"log/{job.number}/{one}"])]:
                left.discard(each)
                with contextlib.suppress(OSError):
                    (run_dir / f"rank{each}.log").write_bytes(self.store.get(f"log/{job.number}/{each}"))
            time.sleep(_POLL_SECONDS)


class _Signals:
    """Signals that ask a process to end. The first rank notes them at once, also while its main thread waits in a
    collective; the others leave them to it. Where a job goes on later (`launch.preemption`), only its ranks hear them,
    while they run."""

    def __init__(self, own: int) -> None:
        self.stderr = os.dup(2)
        self._own, self._handled = own, (signal.SIGTERM, signal.SIGINT)
        self._read, write = os.pipe()
        for end in (self._read, write):
            os.set_blocking(end, False)
        if own == 0 and not preemption.expected():
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self.restore()

    def restore(self) -> None:
        if preemption.expected():
            preemption.ignore()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        for each in self._handled:
            signal.signal(each, signal.SIG_IGN if self._own else lambda *_: None)

    def arrived(self) -> int:
        with contextlib.suppress(BlockingIOError):
            return next((number for number in os.read(self._read, 64) if number in self._handled), 0)
        return 0


class _OfThread:
    """A stream that is one for the main thread, and another for the other threads."""

    def __init__(self, main: TextIO, others: TextIO) -> None:
        self._main, self._others = main, others

    def __getattr__(self, name: str) -> Any:
        of = self._main if threading.current_thread() is threading.main_thread() else self._others
        return getattr(of, name)


@contextlib.contextmanager
def _streams_by_thread() -> Any:
    """Keep what the program prints out of the rank's log, to which the process's output goes in a job."""
    out: Any = _OfThread(sys.stdout, os.fdopen(os.dup(1), "w", buffering=1))
    err: Any = _OfThread(sys.stderr, os.fdopen(os.dup(2), "w", buffering=1))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def _prefix() -> str:
    """The first part of the folder's name. SLURM's task epilog (`hydra_plugins.mdcs_slurm`) removes a killed rank's."""
    names = "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID"
    return f"mdcs-rank-{'.'.join(os.environ.get(name, '') for name in names)}-"
