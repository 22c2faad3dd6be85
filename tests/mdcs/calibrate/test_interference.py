"""What computing and communicating cost each other: the arithmetic by hand, the measurement on two ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mdcs.calibrate import interference as measurement
from mdcs.calibrate.agreement import agree
from mdcs.calibrate.interference import Probe, contention, interference, measure_interference
from mdcs.calibrate.rehearsal import _REHEARSED, Seen, fitted, rehearse
from mdcs.calibrate.slots import measure_profile
from mdcs.model.units import ByLeaf, partition
from mdcs.planner.make import make_plan
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contents import Contention, Profile
from mdcs.profile.link import Kind, Link
from mdcs.simulator.simulate import replay
from mdcs.sizes import MIB
from tests.mdcs.profiles import of_job

from ..profiles import chain
from ..runtime.conftest import two  # noqa: F401  # the ranks that the runtime's tests share


def probe(wire: int, **seconds: float) -> Probe:
    return replace(Probe(2 * wire, 10, wire, work=0.001, step_alone=1.0), **seconds)


def test_contention_is_a_line_over_bytes() -> None:
    # A message keeps the processor for 2 ms + 1 µs per byte beside its work, and the link for 3 ms + 2 µs per byte.
    probes = [probe(b, processor=0.003 + 1e-6 * b, beside=0.003 + 2e-6 * b) for b in (1000, 5000, 9000)]
    found = contention(probes, fraction=0.5)
    assert found.compute_per_message == pytest.approx(0.001)
    assert found.compute_per_byte == pytest.approx(0.5e-6)
    assert found.compute_per_work == 0.5
    assert found.message_seconds == pytest.approx(0.003)
    assert found.seconds_per_byte == pytest.approx(2e-6)


def test_interference_is_what_is_lost_of_the_time_in_flight() -> None:
    # Of 0.5 s in flight 0.1 s is lost: 0.4 s of work took 0.5 s.
    assert interference([probe(1000, step_beside=1.1, overlap=0.5)]) == pytest.approx(0.25)
    assert interference([probe(1000, step_beside=0.9, overlap=0.5)]) == 0


def test_what_rehearsed_plans_show_is_what_the_fitted_profile_replays() -> None:
    slow = chain(*[10**6] * 8, link=Link.uniform(1, 50), forward_s=0.02, backward_s=0.04)
    probed = replace(slow, contention=Contention(1e-3, 1e-9, 0.5, 2e-3, 1e-8))
    true = Contention(2e-3, 2e-9, 1.0, 3e-3, 1.5e-8, dispatch_seconds=1e-3, compute_per_wait=0.1, all_reduce=0.5)
    plans = [make_plan(probed, Uniform(kind), scheduler) for kind, scheduler in _REHEARSED]

    def times(contention: Contention) -> list[Seen]:
        replays = (replay(of_job(plan, profile=replace(probed, contention=contention))).times for plan in plans)
        return [Seen.of(t) for t in replays]

    wanted, before = times(true), times(probed.contention)
    profile = fitted(probed, plans, wanted)
    assert [*profile.rehearsed] == ["zero2 sequential", "zero2 dear", "fsdp wfbp", "dp wfbp"]
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in profile.rehearsed.values())
    for want, got in zip(wanted, times(profile.contention), strict=True):
        assert got.computing == pytest.approx(want.computing, rel=0.03)
        assert got.communicating == pytest.approx(want.communicating, rel=0.03)
        assert got.computing + got.waiting == pytest.approx(want.computing + want.waiting, rel=0.03)
    assert any(got.communicating < 0.9 * want.communicating for want, got in zip(wanted, before, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_no_prediction_runs_away_with_the_noise_of_what_is_seen(seed: int) -> None:
    """Each step took 0.7 to 2 times as long as in the replay, and a small delay of waits is hidden in all plans alike."""
    link = Link((0.011, 0.003, 0.0016, 0.0016), (5e-9,) * 4, 2, 4 * MIB, gap=(0.013,) * 4)
    slow = chain(60_000, 60_000, link=link, forward_s=0.0005, backward_s=0.0006, world=8)
    probed = replace(slow, contention=Contention(4e-3, 1e-10, 1.0, 0.0, 6e-9))
    plans = [make_plan(probed, Uniform(kind), scheduler) for kind, scheduler in _REHEARSED]
    noise = random.Random(seed)
    seen = []
    for plan in plans:
        times = Seen.of(replay(plan).times)
        seen.append(times._replace(waiting=times.waiting * noise.uniform(0.7, 2)))
    rehearsed = fitted(probed, plans, seen).rehearsed
    assert all(0.5 < predicted / measured < 2 for predicted, measured in rehearsed.values()), rehearsed


def test_what_a_short_wait_costs_is_not_told_from_the_noise_of_computing() -> None:
    profile = replace(chain(*[10**6] * 4, link=Link.uniform(1000, 1), forward_s=0.02, backward_s=0.04))
    plans = [make_plan(profile, Uniform(kind), scheduler) for kind, scheduler in _REHEARSED]
    seen = [Seen.of(replay(plan).times) for plan in plans]
    waiting = seen[0].waiting
    assert waiting < 0.05 * 0.24
    seen[0] = seen[0]._replace(computing=seen[0].computing * 1.03)  # the machine was slower for once
    found = fitted(profile, plans, seen).contention.compute_per_wait
    assert 0 < found < 1 < 0.03 * 0.24 / waiting


def test_a_profile_that_predicts_by_more_than_half_wrongly_says_so() -> None:
    off = replace(chain(3), rehearsed={"zero2 dear": (0.16, 0.1), "dp wfbp": (0.04, 0.1), "fsdp wfbp": (0.14, 0.1)})
    assert [*off.doubted] == ["zero2 dear", "dp wfbp"]
    assert off.doubt.endswith("in rehearsal (zero2 dear 160.0 ms, measured 100.0; dp wfbp 40.0 ms, measured 100.0)")
    assert replace(off, rehearsed={}).doubt == ""


def measure() -> tuple[Profile, bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    state = copy.deepcopy(model.state_dict())
    random_state = torch.random.get_rng_state()
    optimizer = torch.optim.Adam(model.parameters())
    units = partition(model, ByLeaf())

    def step() -> torch.Tensor:
        return model(torch.ones(256, 64)).square().mean()

    link = Link.uniform(1, 50, emulated=True)
    profile = agree(measure_profile(model, units, step, optimizer, world=dist.get_world_size(), link=link))
    measured = measure_interference(profile, model, step, optimizer, rounds=1)
    same = all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    same = same and torch.equal(torch.random.get_rng_state(), random_state)
    rehearsed = rehearse(measured, model, units, step, optimizer)
    same = same and all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    same = same and torch.equal(torch.random.get_rng_state(), random_state) and step().requires_grad
    found = rehearsed.contention
    assert found != measured.contention
    return measured, same and all(p.grad is None for p in model.parameters())


@pytest.mark.alone
def test_ranks_agree_on_what_they_measure_and_leave_the_model_alone(two) -> None:  # noqa: F811
    (first, untouched), (second, also_untouched) = two.run(measure)
    assert untouched and also_untouched
    assert first.contention == second.contention != Contention()
    assert first.interference == 0
    names = [name for name in first.spread if name.startswith("step beside messages of ")]
    assert len(names) == 4 and len(first.spread) == 4 + len(first.slots)
    # An emulated message takes at least what its link gives it, 8 ns per byte at 1 Gbit/s, as far as a line through noise tells.
    largest = 2**21
    assert first.contention.message_seconds + first.contention.seconds_per_byte * largest > 0.75 * 8e-9 * largest


def test_a_world_of_one_has_none() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    units = partition(model, ByLeaf())
    link = Link((0.0,) * 4, (0.0,) * 4)
    profile = measure_profile(model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer, world=1, link=link)
    assert measure_interference(profile, model, lambda: model(torch.ones(1, 4)).sum(), optimizer) is profile
    assert rehearse(profile, model, units, lambda: model(torch.ones(1, 4)).sum(), optimizer) is profile


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
    def communicating(self) -> Iterator[None]:
        before, self.here = self.here, self.link
        yield
        self.here = before

    def mark(self) -> object:
        self.here.append(("stamp", stamp := object()))
        return stamp

    stamp = mark

    def after(self, mark: object) -> None:
        self.here.append(("after", mark))

    def pause(self, seconds: float) -> None:
        self.here.append(("pause", seconds))

    def finish(self, works: object) -> None:
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

    def send(buffer: torch.Tensor, *others: torch.Tensor) -> None:
        device.here.append(("message", buffer.numel() * 4 * profile.link.beta_of(Kind.RS) / 2))

    monkeypatch.setattr(measurement, "executor_for", lambda _: device)
    monkeypatch.setattr(measurement, "Communicator", lambda *_: SimpleNamespace(all_gather=send, reduce_scatter=send))
    monkeypatch.setattr(measurement, "meet", lambda: None)
    monkeypatch.setattr(measurement, "gathered", lambda own: [own])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = measure_interference(profile, model, step, optimizer, rounds=1)

    assert found.interference == pytest.approx(0.25) and found.contention == Contention()
    beside = [seconds for seconds in ahead if seconds]
    assert len(beside) == 2 * 2  # of every size, in every round
    assert all(0.3 * computing < seconds < computing for seconds in beside)
    assert all(math.isclose(value, 1.1, rel_tol=0.1) for name, pair in found.spread.items() if "beside" in name for value in pair)
