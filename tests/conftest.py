"""Settings of all tests."""

import signal

import pytest
from hypothesis import settings

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
