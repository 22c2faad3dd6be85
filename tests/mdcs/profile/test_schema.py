"""Profiles: values accepted, and refused by name; a way through JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from mdcs.profile.link import Contention
from mdcs.profile.schema import Profile, Slot, Unit
from tests.mdcs.profiles import FREE, chain, examples, profiles

A_FORWARD, A_BACKWARD = Slot(0, "F", 1.0, 0, 0), Slot(0, "B", 2.0, 0, 0)
A = Unit("a", (6, 4), True, (0, 0), (0, 0))


def test_slots_are_counted_per_phase() -> None:
    profile = chain(10, 20, 30)
    assert (profile.forward_slots, profile.backward_slots) == (3, 3)
    units = Unit("a", (10,), False, (0, 0), None), *profile.units[1:]
    without_gradient = replace(profile, units=units, slots=profile.slots[:-1])
    assert (without_gradient.forward_slots, without_gradient.backward_slots) == (3, 2)


@examples(50)
@given(profiles())
def test_json_gives_the_same_profile_back(profile: Profile) -> None:
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert hash(again) == hash(profile)


@pytest.mark.parametrize("segments", [(), (3, 0), (-1,)])
def test_segments_must_be_positive(segments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="unit a: segments must be positive"):
        Unit("a", segments, True, (0, 0), (0, 0))


def test_a_trainable_unit_needs_a_backward_slot() -> None:
    with pytest.raises(ValueError, match="unit a: is trainable but has no backward slot"):
        Unit("a", (1,), True, (0, 0), None)


@pytest.mark.parametrize("gradients", [((4, 0.5),), ((4, 0.5), (6, 1.1)), ((10, 0.5), (0, 1.0))])
def test_gradients_come_within_their_slot_for_all_elements(gradients: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ValueError, match="unit a: gradients .* are not of 10 elements, each within a slot"):
        replace(A, gradients=gradients)


def test_older_files_know_nothing_of_when_gradients_come() -> None:
    profile = chain(10)
    assert not profile.has_gradient_times
    told = replace(profile, units=(replace(profile.units[0], gradients=((10, 0.5),)),))
    assert told.has_gradient_times and Profile.from_json(told.to_json()) == told


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, "X", 1.0, 0, 0), "slot phase must be 'F' or 'B', got 'X'"),
        ((0, "F", -1.0, 0, 0), "must be >= 0"),
        ((0, "F", 1.0, -1, 0), "must be >= 0"),
        ((0, "F", 1.0, 0, -1), "must be >= 0"),
    ],
)
def test_slots_have_a_phase_and_no_negative_cost(values: tuple[int, str, float, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Slot(*values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "profile schema 1 is not the supported 7"),
        ({"world": 0}, "world must be >= 1, got 0"),
        ({"interference": -0.1}, "interference must be >= 0, got -0.1"),
        ({"slots": ()}, "all forward slots followed by all backward slots"),
        ({"slots": (A_FORWARD,)}, "at least one of each"),
        ({"slots": (A_BACKWARD,)}, "at least one of each"),
        ({"slots": (A_BACKWARD, A_FORWARD)}, "all forward slots followed by all backward slots"),
        ({"slots": (A_FORWARD, A_BACKWARD, A_FORWARD)}, "all forward slots followed by all backward slots"),
        ({"slots": (A_FORWARD, replace(A_BACKWARD, unit=1))}, "slot 1: no unit 1"),
        ({"units": (replace(A, forward=(0, 1)),)}, r"unit 0 \(a\): span \(0, 1\) is outside its 1 slots"),
        ({"units": (replace(A, backward=(1, 1)),)}, r"unit 0 \(a\): span \(1, 1\) is outside its 1 slots"),
    ],
)
def test_what_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    profile = Profile((A,), (A_FORWARD, A_BACKWARD), 2, FREE)
    with pytest.raises(ValueError, match=message):
        replace(profile, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["units", "slots", "world", "link", "optimizer", "collectives", "schema"])
def test_json_without_a_field_is_no_profile(missing: str) -> None:
    data = json.loads(chain(10).to_json())
    del data[missing]
    with pytest.raises(ValueError, match=f"not a profile: '{missing}'"):
        Profile.from_dict(data)


def test_contention_is_stored_and_never_negative() -> None:
    profile = replace(
        chain(10), contention=Contention(1e-3, 1e-9, 1.0, 2e-3, 1e-8, skew_seconds=5e-4), spread={"slot 0": (0.5, 1.5)},
        calibration_runs={"zero2 dear": (1.0, 1.25)}, errors={"gap of all_gather": 1e-5},
    )
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.prediction_error == pytest.approx(0.2) and chain(10).prediction_error is None
    with pytest.raises(ValueError, match="contention message_seconds must be >= 0, got -1"):
        Contention(message_seconds=-1)


def test_json_with_an_unknown_slot_field_is_no_profile() -> None:
    data = json.loads(chain(10).to_json())
    data["slots"][0]["colour"] = "red"
    with pytest.raises(ValueError, match="not a profile: .*colour"):
        Profile.from_dict(data)


def test_a_block_is_worth_what_a_message_costs() -> None:
    """Half of its bytes are sent between two ranks: 9 ms of sending for 1 ms that any message takes beside computing."""
    profile = chain(10, 20, link=replace(FREE, beta=(1e-9,) * 4, block=1000))
    assert profile.block == 1000  # what saturates the link
    assert replace(profile, contention=Contention(message_seconds=1e-3)).block == pytest.approx(18e6, rel=0.1)
    assert replace(profile, contention=Contention(message_seconds=1e-5)).block == pytest.approx(180e3)
    assert replace(profile, link=FREE, contention=Contention(message_seconds=1.0)).block == FREE.block
