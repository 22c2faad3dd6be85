"""Where updates run, and what a message costs the host: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mdcs.plan.plan import Plan
from mdcs.planner.schedulers import Wfbp
from mdcs.profile.link import ExecutionModel
from mdcs.profile.schema import Optimizer, Profile
from mdcs.simulator.simulate import replay
from tests.mdcs.profiles import chain, link, planned

# Backward takes 2 s per unit, forward 1 s. All-reduces take 2 s (a) and 4 s (b), and so do the updates.
PROFILE = chain(8, 16, link=link(1 / 16, depth=2), optimizer=Optimizer(seconds_per_element=1 / 4))


def plan(execution: ExecutionModel, depth: int = 2) -> Plan:
    return planned(replace(PROFILE, link=replace(PROFILE.link, depth=depth), execution=execution), "dp", Wfbp())


def spans(plan: Plan) -> dict[str, tuple[float, float]]:
    return {i.name: (i.start, i.end) for i in replay(plan).intervals if i.lane != "compute"}


@pytest.mark.parametrize(
    ("updates", "depth", "messages", "period_s"),
    [
        # One stream: a's message waits for b's update.
        ("link", 2, {"AR:b": (2, 6), "update:b": (6, 10), "AR:a": (10, 12), "update:a": (12, 14)}, 16),
        # Two streams: a's message starts when b's has landed; the updates follow each other.
        ("stream", 1, {"AR:b": (2, 6), "update:b": (6, 10), "AR:a": (6, 8), "update:a": (10, 12)}, 14),
        # Threads: so many messages start before the first is done; their bytes share the link.
        ("cores", 1, {"AR:b": (2, 6), "update:b": (6, 10), "AR:a": (10, 12), "update:a": (12, 14)}, 16),
        ("cores", 2, {"AR:b": (2, 6), "update:b": (6, 10), "AR:a": (4, 8), "update:a": (10, 12)}, 14),
    ],
)
def test_where_updates_run(updates: str, depth: int, messages: dict[str, tuple[float, float]], period_s: float) -> None:
    it = plan(ExecutionModel(updates), depth)
    assert spans(it) == messages
    assert replay(it).period_s == period_s


@pytest.mark.parametrize(("per_message", "per_slot", "seconds"), [(10.0, 0.0, 20), (0.0, 5.0, 22), (1.0, 1.0, 14)])
def test_the_host_that_enqueues_bounds_the_period_unless_it_is_ahead(per_message: float, per_slot: float, seconds: float) -> None:
    """Two messages, four slots; a step begins when the device is done with the last slot, of 2 s."""
    assert replay(plan(ExecutionModel("stream", per_message, per_slot))).period_s == seconds


def test_a_profile_says_how_its_device_executes() -> None:
    on_device = replace(PROFILE, execution=ExecutionModel("stream", 1e-4))
    assert Profile.from_json(on_device.to_json()) == on_device


@pytest.mark.parametrize("wrong", [{"updates": "gpu"}, {"host_seconds_per_slot": -1.0}])
def test_what_no_backend_can_declare(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="execution"):
        ExecutionModel(**wrong)  # type: ignore[arg-type]
