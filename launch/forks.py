"""A process that forks ranks: `python -m launch.forks PARENT`, one job a line on stdin.

It sees the ranks end and writes the exit codes of those that failed. It imports torch once for all of them. Between
jobs it also imports the modules that rank 0 of the last job had imported at its end. A rank is a fork, so the next job
starts without any state of the last one. This process starts no thread and makes no tensor: neither survives a fork
intact. Of a shaped cluster it has the ranks of one node (`launch.shaped`).
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
from launch.network import addresses
from launch.rank import report_of

_POLL_SECONDS = 0.01
_LOOPBACK = "127.0.0.1"
_PORT = 29500  # of a shaped cluster's first node; free, because the network namespace is the job's own
_REPORT_SECONDS = 3.0
"""Seconds that the other ranks get when one has failed: the first failure seen need not be the first that happened."""


def main(parent: int) -> int:
    """Run jobs until stdin ends. Return 1 if a rank of the last one has failed, else 0."""
    orphans.die_with_parent(parent)
    import torch.distributed  # noqa: F401

    from launch import rendezvous

    failed: dict[int, int] = {}
    for line in sys.stdin:
        job = json.loads(line)
        folder = Path(job["folder"])
        log = os.open(folder / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        gc.collect()
        gc.freeze()  # a collection in a fork would write to shared pages, and so copy them
        with tempfile.TemporaryFile("w+") as imported:
            codes = _run(job, folder, imported, rendezvous.serve_on)
            failed = {rank: code for rank, code in codes.items() if code}
            report_of(folder, job.get("node", 0)).write(json.dumps({"schema": 1, "exit_codes": failed}))
            imported.seek(0)
            if not job["once"]:
                _import(imported.read().split(), job["module"])
    return int(bool(failed))


def _run(job: dict[str, Any], folder: Path, imported: IO[str], serve_on: Any) -> dict[int, int]:
    """Fork a job's ranks and wait. Return the exit codes of the ranks that ended by themselves."""
    node, beside = job.get("node", 0), job["ranks"] // job["nodes"]
    meeting = (_LOOPBACK, 0) if job["rate_gbit"] is None else (addresses(1)[0], _PORT)
    listener = socket.create_server(meeting, backlog=socket.SOMAXCONN) if node == 0 else None
    address, port = meeting if listener is None else listener.getsockname()
    ranks: dict[int, int] = {}
    parent = os.getpid()
    for local in range(beside):
        rank = node * beside + local
        place = {
            "RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": beside,
            "MASTER_ADDR": address, "MASTER_PORT": port,
        }  # fmt: skip
        if (pid := os.fork()) == 0:
            _rank(parent, job, folder, place, listener, imported, serve_on)
        ranks[pid] = rank
    if listener is not None:
        listener.close()  # rank 0 has it
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
    parent: int, job: dict[str, Any], folder: Path, place: dict[str, Any], listener: socket.socket | None, imported: IO[str],
    serve_on: Any,
) -> NoReturn:  # fmt: skip
    code = 1
    try:
        os.setsid()
        orphans.die_with_parent(parent)
        from launch import rank as ranks

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= {key: str(value) for key, value in place.items()} | {
            "TORCHELASTIC_USE_AGENT_STORE": "True", ranks.AGENT_PID: str(parent),
        }  # fmt: skip
        _reseed()
        store = None
        if listener is not None:
            if place["RANK"] == 0:
                store = serve_on(listener.detach(), place["MASTER_ADDR"], place["MASTER_PORT"])
            else:
                listener.close()
        code = ranks.main(folder, job["module"], job["arguments"])
        if place["RANK"] == 0 and code == 0:
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
    sys.exit(main(int(sys.argv[1])))
