"""The host's time for a message, as measured on a GPU's host; here a CPU does what the device would do behind it."""

from __future__ import annotations

import pytest
import torch

import mdcs
from mdcs.profiler import host_timing, model_profile
from mdcs.profiler.host_timing import NO_TIME, forward, seconds_per_message, tiny
from mdcs.runtime.executor import CudaExecutor, execution_on

CPU = torch.device("cpu")


def test_one_more_message_takes_the_host_some_time_and_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    model, optimizer, units = tiny(CPU)
    profile = mdcs.measure_profile(model, units, lambda: forward(model), optimizer, world=2, link=NO_TIME)
    assert 0 < seconds_per_message(profile, CPU) < 0.1
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_measured_where_the_device_executes_behind_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_timing, "seconds_per_message", lambda profile, device: 2e-4)
    model, optimizer, units = tiny(CPU)

    def measured() -> float:
        profile = mdcs.measure_profile(model, units, lambda: forward(model), optimizer, world=2, link=NO_TIME)
        return profile.execution.host_seconds_per_message

    assert measured() == execution_on(CPU).host_seconds_per_message == 0
    monkeypatch.setattr(model_profile, "execution_on", lambda device: CudaExecutor.execution)
    assert measured() == 2e-4
