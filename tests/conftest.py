"""Settings of all tests."""

import contextlib
import signal

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

LONG = (
    "test_on_slurm", "test_readme", "test_worker", "test_machines", "test_engines", "test_random_plans", "test_departures",
    "test_equality", "test_memory", "test_random_aliases", "test_elastic", "test_wheel", "test_trainers", "test_asynchronous",
    "test_ready_experiments", "test_train",
)  # fmt: skip
"""Files that take longest: they come first, so that no process has one of them left when the others have ended."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


class SurvivesCrashes(LoadFileScheduling):
    """A file at a time, as xdist's own; but a worker process that dies fails its test, and its other tests run elsewhere.

    xdist 3.8 runs the fatal test again, which ends the next worker, and then waits for ever.
    """

    def remove_node(self, node):
        units = self.assigned_work.pop(node)
        fatal = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        for unit in units.values():
            if fatal in unit:
                unit[fatal] = True
        left = {file: unit for file, unit in units.items() if not all(unit.values())}
        self.workqueue.update(left)
        for other in self.assigned_work:
            self._reschedule(other)
        return fatal

    def _reschedule(self, node):
        super()._reschedule(node)
        # A worker begins a test only when it knows the next one, or that there is none. xdist gives a new worker, in the
        # place of a dead one, a single file: with one test in it both would wait for ever.
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)

    def _assign_work_unit(self, node):
        if node in self.registered_collections:  # a new worker has collected its tests only later
            with contextlib.suppress(OSError):  # it has just died: `remove_node` will give its work to others
                super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return SurvivesCrashes(config, log) if config.getoption("dist") == "loadfile" else None


# A shell's background job ignores it, and so would the programs that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory):
    """No test reads or writes the profiles of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDCS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MDCS_CACHE", str(tmp_path_factory.mktemp("cache")))
