"""What computing and communicating cost each other: the arithmetic by hand, the measurement on two ranks."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mdcs.calibrate.agreement import agree
from mdcs.calibrate.interference import Probe, contention, interference, measure_interference
from mdcs.calibrate.rehearsal import _REHEARSED, Seen, fitted, rehearse
from mdcs.calibrate.slots import measure_profile
from mdcs.model.units import ByLeaf, partition
from mdcs.planner.make import make_plan
from mdcs.planner.strategies.uniform import Uniform
from mdcs.profile.contents import Contention, Profile
from mdcs.profile.link import Link
from mdcs.simulator.simulate import replay
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
    assert [*profile.rehearsed] == ["zero1 sequential", "zero1 dear", "fsdp wfbp", "dp wfbp"]
    assert all(predicted == pytest.approx(measured, rel=0.03) for predicted, measured in profile.rehearsed.values())
    for want, got in zip(wanted, times(profile.contention), strict=True):
        assert got.computing == pytest.approx(want.computing, rel=0.03)
        assert got.communicating == pytest.approx(want.communicating, rel=0.03)
        assert got.computing + got.waiting == pytest.approx(want.computing + want.waiting, rel=0.03)
    assert any(got.communicating < 0.9 * want.communicating for want, got in zip(wanted, before, strict=True))


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
