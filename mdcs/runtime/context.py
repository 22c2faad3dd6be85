"""The context of a run: the few things that every part of it needs, and the byte account."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from mdcs.plan.ledger import Ledger
from mdcs.plan.lifetimes import CATEGORIES
from mdcs.plan.plan import Plan
from mdcs.runtime.errors import ErrorContext
from mdcs.runtime.executor import Executor, executor_for
from mdcs.runtime.step_trace import StepRecorder
from mdcs.telemetry.memory_meter import Meter, current_meter
from mdcs.torch_compat import is_profiled

_NOTHING = nullcontext()


def named_range(phase: str, *what: object) -> AbstractContextManager[Any]:
    """Return a context whose body is ``mdcs::<phase> <what>`` in a trace; next to free without a profiler."""
    if not is_profiled():
        return _NOTHING
    return torch.profiler.record_function(" ".join([f"mdcs::{phase}", *map(str, what)]))


class ByteAccount:
    """Live and peak bytes of this rank by the categories of the ledger. Call with ``lock`` (reentrant) held.

    Every allocation and release of a registered buffer is booked under one lock together with the real one. The
    account's categories therefore equal the allocator's to the byte. Admission counts promised bytes
    (:mod:`mdcs.runtime.wire`).

    ``outside``: bytes of units that are whole outside of the plan.
    """

    def __init__(self, lock: threading.RLock, at_rest: dict[str, int]) -> None:
        self.lock, self.at_rest, self.outside = lock, at_rest, 0
        self.restart()
        self.reset()

    def restart(self) -> None:
        """Reset to the bytes at rest: no message, gather or gradient is held."""
        # "activations": of the current slot, workspace included
        self.live = dict.fromkeys(CATEGORIES, 0) | self.at_rest
        self._total = sum(self.at_rest.values())

    def reset(self) -> None:
        """Restart peaks and windows at the live bytes."""
        self.peak = self._now()
        self._window = self._now()

    def _now(self) -> dict[str, int]:
        return {**self.live, "total": self._total}

    def record(self, category: str, size: int) -> None:
        """Book allocated (positive) or freed (negative) bytes."""
        live = self.live[category] = self.live[category] + size
        total = self._total = self._total + size
        if size > 0:  # inlined: this runs several times per message
            for highest in (self.peak, self._window):
                if live > highest[category]:
                    highest[category] = live
                if total > highest["total"]:
                    highest["total"] = total

    def set_activations(self, activations: int) -> None:
        """Set the activations of the slot that compute enters (bytes besides the registered buffers)."""
        self.record("activations", activations - self.live["activations"])

    def take_window_peak(self) -> dict[str, int]:
        """Return the peaks by category since the last call."""
        out, self._window = self._window, self._now()
        return out


@dataclass
class RunContext:
    """Plan, bytes, device and records of a run, for all of its parts.

    - ``place``: this rank, and the step that errors name. ``device``: where parameters are.
    - ``timeout_s``: seconds after which waiting for other ranks is an error.
    - ``ledger``: the plan's bytes on this rank. ``account``: the bytes that are held.
    - ``executor``, ``meter``: of the device. ``recorder``: what ran when.
    """

    plan: Plan
    place: ErrorContext
    device: torch.device = torch.device("cpu")
    timeout_s: float = 300.0
    ledger: Ledger = field(init=False)
    account: ByteAccount = field(init=False)
    executor: Executor = field(init=False)
    meter: Meter = field(init=False)
    recorder: StepRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.plan, self.place.rank)
        self.account = ByteAccount(threading.RLock(), self.ledger.at_rest)
        self.executor, self.meter = executor_for(self.device), current_meter(self.device)
        self.recorder = StepRecorder(self.plan, self.executor)

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.place.rank

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Name what the body does, in errors and in traces."""
        with self.place.during(what), named_range(what):
            yield
