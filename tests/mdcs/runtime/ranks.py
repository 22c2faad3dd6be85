"""Real ranks for tests: N processes that stay alive and run one function after the other, each in a fresh process group.

A function runs on every rank as ``function(*arguments)`` between ``init_process_group`` and
``destroy_process_group``; it must be importable by name and take and return what pickle can carry. Every call has a
hard deadline: ranks that miss it say where they are, are killed, and the next call starts new ones.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from mdcs.profiler import model_profile
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, ShimMeter

ROOT = Path(__file__).resolve().parents[3]
# What a rank imports sooner or later; torch brings its compiler when an optimizer is first used.
PRELOADED = ("torch._dynamo", "torch.distributed.checkpoint", "transformers.modeling_utils", "tests.mdcs.runtime.training")


@dataclass
class Outcome:
    """Result of one rank's call: a value, an error, or the exit code of a process that is gone."""

    value: Any = None
    kind: str = ""  # class of the exception
    message: str = ""
    trace: str = ""
    exit_code: int | None = None

    @property
    def ok(self) -> bool:
        return not self.kind and self.exit_code is None


NOT_CONNECTED = "the ranks did not connect"


class Ranks:
    """``environment`` is what the processes start with instead of this one's.

    Without one they are forks of a server that has imported what ranks need, ready in milliseconds.
    """

    def __init__(self, world: int, environment: dict[str, str] | None = None) -> None:
        self.world, self.environment = world, environment
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="mdcs-test-ranks-")
        self._calls = 0

    def run(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Any]:
        """The values by rank. Raises AssertionError with every rank's error if there is one."""
        outcomes = self.outcomes(function, *arguments, timeout_s=timeout_s)
        failed = [
            f"--- rank {r}: exit {o.exit_code} {o.kind}: {o.message}\n{o.trace}" for r, o in enumerate(outcomes) if not o.ok
        ]
        if failed:
            self.stop()  # what a failed call left behind must not be another's problem
            raise AssertionError(f"{function.__name__}{arguments}\n" + "\n".join(failed))
        return [o.value for o in outcomes]

    def outcomes(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0) -> list[Outcome]:
        """Results of every rank. Raises AssertionError with all stacks when the deadline passes.

        Rarely gloo does not connect on a busy machine: then new ranks try once more.
        """
        outcomes = self._outcomes(function, arguments, timeout_s)
        if any(o.kind == NOT_CONNECTED for o in outcomes):
            self.stop()
            outcomes = self._outcomes(function, arguments, timeout_s)
        return outcomes

    def _outcomes(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> list[Outcome]:
        self._start()
        self._calls += 1
        store = Path(self._folder.name) / f"store{self._calls}"
        begin = time.monotonic()
        for rank, pipe in enumerate(self._pipes):
            pipe.send((rank, self.world, str(store), function.__module__, function.__qualname__, arguments))
        outcomes = []
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if not pipe.poll(max(0.0, begin + timeout_s - time.monotonic())):
                stacks = self._stacks()
                self.stop()
                raise AssertionError(f"{function.__name__}{arguments}: not done in {timeout_s} s\n{stacks}")
            try:
                outcomes.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                process.join(10)
                outcomes.append(Outcome(exit_code=process.exitcode))
        if any(o.exit_code is not None for o in outcomes):
            self.stop()
        return outcomes

    def _start(self) -> None:
        if self._processes:
            return
        context: BaseContext = multiprocessing.get_context("forkserver" if self.environment is None else "spawn")
        context.set_forkserver_preload(["__main__", *PRELOADED])
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**(self.environment or {}), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}.items():
                patch.setenv(name, value)
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, self._stderr(rank), self.environment is None), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        for pipe in self._pipes:
            pipe.recv()  # what imports take is no call's

    def _stderr(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.err"

    def _stacks(self) -> str:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"--- rank {r}:\n{self._stderr(r).read_text(errors='replace')[-6000:]}" for r in range(self.world))

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


class OnTwo(list[Any]):
    """Functions that two ranks run, each with rows of arguments, and that return what is wrong: an empty list.

    A module has one, decorates its functions with it (one argument, a tuple of several, or ``pytest.param``, for each row),
    and has their test at its end: ``test_… = on_two.as_test()``. One whose first argument is ``root`` is given a folder.
    """

    def as_test(self, timeout_s: float = 60.0) -> Callable[..., None]:
        @pytest.mark.parametrize(("function", "arguments"), self)
        def run(two: Ranks, tmp_path: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            folder = [str(tmp_path)] if "root" in inspect.signature(function).parameters else []
            found = two.run(function, *folder, *arguments, timeout_s=timeout_s)
            assert found == [[], []], found

        return run

    def __call__(self, *rows: Any) -> Callable[..., Any]:
        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for row in rows or ((),):
                marks, row = getattr(row, "marks", ()), getattr(row, "values", row)
                row = row if isinstance(row, tuple) else (row,)
                self.append(pytest.param(function, row, marks=marks, id="-".join(map(str, (function.__name__, *row)))))
            return function

        return add


def _serve(pipe: Connection, output: Path, is_hasty: bool) -> None:
    os.setsid()
    with output.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    for module in PRELOADED:
        import_module(module)
    if is_hasty:  # where what an update takes is of no use to a test
        model_profile._CACHES, model_profile._LONG = 1 << 16, 1 << 14
    gc.freeze()  # what has been imported is no garbage: to look through it takes longer than most tests
    pipe.send("ready")
    while True:
        try:
            rank, world, store, module, name, arguments = pipe.recv()
        except EOFError:
            break
        pipe.send(_call(rank, world, store, module, name, arguments))
    sys.stdout.flush()
    os._exit(0)  # a rank whose test left a thread blocked must still end


_READINGS = {name: getattr(ShimMeter, name) for name in ("live", "peaks", "window")}


def _count_from_here() -> None:
    """Leave out what earlier calls have left, such as a random state or a model in a cache."""
    left = _READINGS["live"](ShimMeter())[UNTAGGED]
    for name, read in _READINGS.items():
        setattr(ShimMeter, name, lambda meter, read=read: _less(read(meter), left))


def _less(reading: dict[str, int], left: int) -> dict[str, int]:
    return {name: size - left if name in (UNTAGGED, TOTAL) else size for name, size in reading.items()}


def _call(rank: int, world: int, store: str, module: str, name: str, arguments: tuple[Any, ...]) -> Outcome:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.collect()
    _count_from_here()
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    except RuntimeError as e:
        return Outcome(kind=NOT_CONNECTED, message=str(e), trace=traceback.format_exc())
    try:
        outcome = Outcome(getattr(import_module(module), name)(*arguments))
    except Exception as e:
        outcome = Outcome(kind=type(e).__name__, message=str(e), trace=traceback.format_exc())
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    return outcome
