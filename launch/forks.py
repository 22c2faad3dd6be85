"""A process that forks ranks: `python -m launch.forks`, one job a line on stdin. It ends, and kills ranks, when stdin
is closed.

It sees the ranks end and writes the exit codes of those that failed. It imports torch once for all of them, and between
jobs what rank 0 of the last job had imported at its end; a job starts without any other state of the last one. This
process starts no thread and makes no tensor: neither survives a fork intact. It also holds the network of a shaped
cluster (`launch.network`), which disappears with its processes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from launch import rank as ranks
from launch.network import Network, NetworkError, addresses

_POLL_SECONDS = 0.01
_REPORT_SECONDS = 3.0
"""Seconds that the other ranks get when one has failed: the first failure seen need not be the first that happened."""
_REAP_SECONDS = 1.0


def main() -> int:
    """Run jobs until stdin ends. Return 1 if a rank of the last one has failed, else 0."""
    ranks.adopt_orphans()  # what a rank leaves behind
    network: Network | None = None
    failed: dict[int, int] = {}
    for line in _lines():
        job = json.loads(line)
        if job["rate_gbit"] is not None and network is None:
            try:
                network = Network(job["nodes"], job["rate_gbit"])  # before torch: it takes a process of one thread
            except NetworkError as error:
                print(error)  # the last line of agent.log is the launcher's reason
                return 1
        importlib.import_module("launch.rendezvous")  # and torch
        folder = Path(job["folder"])
        ranks.print_into(folder / "agent.log")
        gc.collect()
        gc.freeze()  # a collection in a fork would write to shared pages, and so copy them
        with tempfile.TemporaryFile("w+") as imported:
            codes = _run(job, folder, network, imported)
            failed = {rank: code for rank, code in codes.items() if code}
            ranks.report_of(folder, 0).write(json.dumps({"schema": 1, "exit_codes": failed}))
            imported.seek(0)
            if not job["once"]:
                _import(imported.read().split(), job["module"])
    return int(bool(failed))


def _lines() -> Iterator[str]:
    """The lines of stdin. Nothing is read ahead: that stdin is readable during a job says that it is closed."""
    with os.fdopen(os.dup(0), "rb", buffering=0) as commands:
        while line := commands.readline():
            yield line.decode()


def _run(job: dict[str, Any], folder: Path, network: Network | None, imported: IO[str]) -> dict[int, int]:
    """Fork a job's ranks and wait. Return the exit codes of the ranks that ended by themselves."""
    beside = job["ranks"] // job["nodes"]
    inside: Callable[[int], Any] = (lambda node: contextlib.nullcontext()) if network is None else network.inside
    with inside(0):
        host = "127.0.0.1" if network is None else addresses(1)[0]
        listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    address, port = listener.getsockname()
    by_pid, codes = dict[int, int](), dict[int, int]()
    parent = os.getpid()
    failed: float | None = None
    try:
        for rank in range(job["ranks"]):
            node, local = divmod(rank, beside)
            place = {
                "RANK": rank, "WORLD_SIZE": job["ranks"], "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": beside,
                "MASTER_ADDR": address, "MASTER_PORT": port,
            }  # fmt: skip
            with inside(node):
                if (pid := os.fork()) == 0:
                    _rank(parent, job, folder, place, listener, imported)
            by_pid[pid] = rank
        listener.close()  # rank 0 has it
        while len(codes) < len(by_pid):
            ended, state = os.waitpid(-1, os.WNOHANG)
            if ended in by_pid:
                codes[by_pid[ended]] = code = os.waitstatus_to_exitcode(state)
                failed = failed or (time.monotonic() if code else None)
            elif failed is not None and time.monotonic() - failed > _REPORT_SECONDS or select.select([0], [], [], 0)[0]:
                break
            else:
                time.sleep(_POLL_SECONDS)
    finally:
        ranks.kill_groups(by_pid)  # and what the others have left running
        deadline = time.monotonic() + _REAP_SECONDS
        with contextlib.suppress(ChildProcessError):  # all have ended
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(_POLL_SECONDS)
    return codes


def _rank(
    parent: int, job: dict[str, Any], folder: Path, place: dict[str, Any], listener: socket.socket, imported: IO[str]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        ranks.die_with_parent(parent)
        from launch import rendezvous

        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= {key: str(value) for key, value in place.items()} | {
            "TORCHELASTIC_USE_AGENT_STORE": "True", ranks.AGENT_PID: str(parent),
        }  # fmt: skip
        random.seed()  # from the system, as in a process that was not forked
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        store = None
        if place["RANK"] == 0:
            store = rendezvous.serve_on(listener.detach(), place["MASTER_ADDR"], place["MASTER_PORT"])
        else:
            listener.close()
        code = ranks.main(folder, job["module"], job["arguments"])
        if place["RANK"] == 0 and code == 0:
            imported.write("\n".join(sys.modules))
            imported.flush()
        del store
    except BaseException:
        traceback.print_exc()  # before the rank has its log this is agent.log, whose last line is the launcher's reason
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # exit handlers belong to the parent process


def _import(names: list[str], without: str) -> None:
    for name in names:
        if name not in sys.modules and name not in ("__main__", without):
            with contextlib.suppress(Exception):  # e.g. a module made at run time: the next job does without it
                importlib.import_module(name)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(main())
