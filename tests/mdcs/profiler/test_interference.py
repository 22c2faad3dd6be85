"""How much a GPU's compute slows down beside messages: the arithmetic by hand, the order of launches on a clock."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mdcs.profile.link import Contention, Kind, Link
from mdcs.profiler import interference as measurement
from mdcs.profiler.interference import Sample, interference, measure_interference

from ..profiles import chain


def test_interference_is_what_is_lost_of_the_time_in_flight() -> None:
    # Of 0.5 s in flight 0.1 s is lost: 0.4 s of work took 0.5 s.
    assert interference([Sample(alone=1.0, beside=1.1, overlap=0.5)]) == pytest.approx(0.25)
    assert interference([Sample(alone=1.0, beside=0.9, overlap=0.5)]) == 0


def test_a_cpu_has_none() -> None:
    model = torch.nn.Linear(4, 4)
    profile = chain(1000)
    assert measure_interference(profile, model, lambda: model(torch.ones(1, 4)).sum()) is profile


class TwoStreams:
    """An executor of a device whose host runs ahead, on a clock of its own: computing is ``slower`` beside a message.

    A stream is a list of what it was given: seconds of work, stamps, marks, and waits for marks. Whoever waits for a stamp has
    all of it done first, as a synchronisation does.
    """

    runs_ahead = True

    def __init__(self, slower: float) -> None:
        self.slower, self.now = slower, 0.0
        self.compute: list[tuple[str, Any]] = []
        self.link: list[tuple[str, Any]] = []
        self.here = self.compute
        self.times: dict[object, float] = {}

    @contextlib.contextmanager
    def on_comm_stream(self) -> Iterator[None]:
        before, self.here = self.here, self.link
        yield
        self.here = before

    def record_event(self) -> object:
        self.here.append(("stamp", stamp := object()))
        return stamp

    record_timestamp = record_event

    def wait_event(self, mark: object) -> None:
        self.here.append(("after", mark))

    def sleep(self, seconds: float) -> None:
        self.here.append(("pause", seconds))

    def wait_works(self, works: object) -> None:
        """The stream has them in order."""

    def seconds(self, stamp: object) -> float:
        if stamp not in self.times:
            self.do_all()
        return self.times[stamp]

    def do_all(self) -> None:
        while self.compute or self.link:
            if self._instants(self.compute) or self._instants(self.link):
                continue
            busy = [stream[0] for stream in (self.compute, self.link) if stream and stream[0][0] in ("work", "pause", "message")]
            is_beside = len(busy) == 2 and busy[0][0] == "work" and busy[1][0] == "message"
            speeds = [1 / self.slower if is_beside and what == "work" else 1.0 for what, _ in busy]
            passed = min(left / speed for (_, left), speed in zip(busy, speeds, strict=True))
            self.now += passed
            for stream in (self.compute, self.link):
                if stream and stream[0] in busy:
                    what, left = stream[0]
                    left -= passed * speeds[busy.index(stream[0])]
                    stream[:1] = [] if left < 1e-12 else [(what, left)]

    def _instants(self, stream: list[tuple[str, Any]]) -> bool:
        """Do what takes no time; whether there was any."""
        done = 0
        while stream and (stream[0][0] == "stamp" or stream[0][0] == "after" and stream[0][1] in self.times):
            what, mark = stream.pop(0)
            done += 1
            if what == "stamp":
                self.times[mark] = self.now
        return done > 0


def test_on_a_gpu_the_step_runs_beside_messages_that_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for the device between them and the step would have them end before it begins."""
    device = TwoStreams(slower=1.25)
    model = torch.nn.Linear(4, 4)
    profile = chain(1000, 1000, world=2, link=Link.uniform(100, 5), forward_s=0.02, backward_s=0.04)
    computing = sum(slot.seconds for slot in profile.slots)
    ahead: list[float] = []  # at every step: seconds of messages that are on their way

    def step() -> torch.Tensor:
        ahead.append(sum(left for what, left in device.link if what == "message"))
        device.here.append(("work", computing))
        loss: torch.Tensor = model(torch.ones(1, 4)).sum()
        return loss

    def send(kind: Kind, buffer: torch.Tensor, *others: torch.Tensor) -> None:
        device.here.append(("message", buffer.numel() * 4 * profile.link.beta_of(Kind.RS) / 2))

    monkeypatch.setattr(measurement, "executor_for", lambda _: device)
    monkeypatch.setattr(measurement, "Communicator", lambda *_: SimpleNamespace(launch=send, scratch=lambda *_: 0))
    monkeypatch.setattr(measurement, "barrier", lambda: None)
    monkeypatch.setattr(measurement, "all_gather_object", lambda own: [own])
    found = measure_interference(profile, model, step, rounds=1)

    assert found.interference == pytest.approx(0.25) and found.contention == Contention()
    beside = [seconds for seconds in ahead if seconds]
    assert len(beside) == 2 * 2  # of every size, in every round
    assert all(0.3 * computing < seconds < computing for seconds in beside)
    assert all(math.isclose(value, 1.1, rel_tol=0.1) for name, pair in found.spread.items() if "beside" in name for value in pair)
