"""Whatever a tracker does, a run goes on: one warning, and no waiting."""

import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from experiments.trackers import tracker as aside
from experiments.trackers.tracker import Aside, Mirror


class Broken(Exception):
    pass


class Faulty(Mirror):
    """Does `act` in the method named `at`."""

    def __init__(self, at: str, act, calls: list[str]) -> None:
        self.at, self.act, self.calls = at, act, calls
        self._do("start")

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if name == self.at:
            self.act()

    def event(self, event):
        self._do("event")

    def pictures(self, files):
        self._do("pictures")

    def finish(self, ok):
        self._do("finish")


def whole_run(at: str, act) -> tuple[list[str], list[str]]:
    """Everything a run does with its tracker; returns (warnings, the mirror's calls)."""
    calls: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = Aside("W&B", 20.0, lambda: Faulty(at, act, calls))
        for _ in range(3):
            run.call("event", {"event": "step"})
        run.call("pictures", [])
        run.finish(True)
        run.finish(True)
    return [str(warning.message) for warning in caught], calls


def fail() -> None:
    raise Broken("as told,\nin two lines")


def test_calls_come_in_order():
    said, calls = whole_run("nowhere", fail)
    assert said == [] and calls == ["start", "event", "event", "event", "pictures", "finish"]


@pytest.mark.parametrize(
    ("at", "words"), [("start", "start"), ("event", "log"), ("pictures", "log pictures"), ("finish", "finish")]
)
def test_it_may_fail_anywhere_and_is_warned_about_once(at, words):
    said, calls = whole_run(at, fail)
    assert said == [f"W&B could not {words}, the run goes on without it: Broken: as told, in two lines"]
    assert calls.count(at) == 1 and calls[-1] == at  # and is left alone afterwards


@pytest.mark.parametrize(("at", "words"), [("start", "start"), ("event", "log"), ("finish", "finish")])
def test_it_may_hang_anywhere_and_is_left_alone(at, words, monkeypatch):
    released, clock = threading.Event(), SimpleNamespace(now=0.0)
    monkeypatch.setattr(aside, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def hang() -> None:
        clock.now += 21.0
        released.wait(60)

    begun = time.monotonic()
    said, _ = whole_run(at, hang)
    released.set()
    assert said == [f"W&B could not {words}, the run goes on without it: no answer for 20 s"]
    assert time.monotonic() - begun < 50


def test_a_caller_does_not_wait_for_a_slow_tracker():
    released = threading.Event()
    aside = Aside("W&B", 60.0, lambda: Faulty("start", released.wait, []))
    for _ in range(1000):
        aside.call("event", {})
    assert not released.is_set()  # it has not begun, and all is said
    released.set()
    aside.finish(True)


def test_a_key_is_not_repeated_in_a_warning(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "very-secret")

    def refuse():
        raise ValueError("API key very-secret is too short")

    said, _ = whole_run("start", refuse)
    assert said == ["W&B could not start, the run goes on without it: ValueError: API key $WANDB_API_KEY is too short"]
