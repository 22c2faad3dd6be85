"""A process that stays between jobs and forks their ranks: `python -m launch.forks PARENT`, one job a line on stdin.

It has the part that torch's elastic agent has for a single job (`launch.agent`): it sees the ranks end and writes their
exit codes. Between jobs it only imports the modules that rank 0 of the last job had imported at its end. A rank is a
fork, so the next job starts without any state of the last one. This process starts no thread and makes no tensor:
neither survives a fork intact.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, NoReturn

from launch import orphans
from launch.agent import LOOPBACK, report_of

_POLL_SECONDS = 0.01
_REPORT_SECONDS = 3.0
"""Seconds that the other ranks get when one has failed: the first failure seen need not be the first that happened."""


def main(parent: int) -> None:
    """Run jobs until stdin ends."""
    orphans.die_with_parent(parent)
    import torch.distributed  # noqa: F401

    from launch import rendezvous

    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to shared pages, and so copy them
        with tempfile.TemporaryFile("w+") as imported:
            codes = _run(job, folder, imported, rendezvous.serve_on)
            failed = {rank: code for rank, code in codes.items() if code}
            report_of(folder, None).write(json.dumps({"schema": 1, "exit_codes": failed}))
            imported.seek(0)
            _import(imported.read().split(), job["module"])


def _run(job: dict[str, Any], folder: Path, imported: IO[str], serve_on: Any) -> dict[int, int]:
    """Fork a job's ranks and wait. Return the exit codes of the ranks that ended by themselves."""
    with socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN) as listener:
        ranks: dict[int, int] = {}
        parent = os.getpid()
        for rank in range(job["ranks"]):
            if (pid := os.fork()) == 0:
                _rank(parent, job, folder, rank, listener, imported, serve_on)
            ranks[pid] = rank
    codes: dict[int, int] = {}
    failed: float | None = None
    while len(codes) < len(ranks):
        ended, state = os.waitpid(-1, os.WNOHANG)
        if ended in ranks:
            codes[ranks[ended]] = os.waitstatus_to_exitcode(state)
            failed = failed or (time.monotonic() if codes[ranks[ended]] else None)
        elif failed is not None and time.monotonic() - failed > _REPORT_SECONDS:
            left = [pid for pid, rank in ranks.items() if rank not in codes]
            orphans.kill_groups(left)
            for pid in left:
                os.waitpid(pid, 0)
            break
        else:
            time.sleep(_POLL_SECONDS)
    return codes


def _rank(
    parent: int, job: dict[str, Any], folder: Path, rank: int, listener: socket.socket, imported: IO[str], serve_on: Any
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        orphans.die_with_parent(parent)
        from launch import rank as ranks

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        address, port = listener.getsockname()
        place = {"RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": job["ranks"]}
        os.environ |= {key: str(value) for key, value in place.items()} | {
            "MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            ranks.AGENT_PID: str(parent),
        }  # fmt: skip
        _reseed()
        if rank:
            listener.close()
        store = None if rank else serve_on(listener.detach(), address, port)
        code = ranks.main(folder, job["module"], job["arguments"])
        if rank == 0 and code == 0:
            imported.write("\n".join(sys.modules))
            imported.flush()
        del store
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # exit handlers belong to the parent process


def _reseed() -> None:
    """Seed the random generators from the system, as in a process that was not forked."""
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _import(names: list[str], without: str) -> None:
    for name in names:
        if name not in sys.modules and name not in ("__main__", without):
            with contextlib.suppress(Exception):  # e.g. a module made at run time: the next job does without it
                importlib.import_module(name)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(int(sys.argv[1]))
