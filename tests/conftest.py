"""Settings of all tests."""

import datetime
import gc
import itertools
import signal
import zlib

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
NUMBERS = itertools.count()

# A shell's background job ignores it, and so would the programs that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="a part of the test files: 2/3 is the second of three")


def pytest_configure(config: pytest.Config) -> None:
    """Draw new examples each day; every run of a day, on every machine, draws the same."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests that start a SLURM: they wait most of their minutes, while others have the cores."""
    part, parts = map(int, config.option.shard.split("/"))
    items[:] = [item for item in items if zlib.crc32(item.nodeid.partition("::")[0].encode()) % parts == part - 1]
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out of garbage collection all that has been imported: to look through it takes longer than most tests."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> str:
    return f"examples of properties: --hypothesis-seed={config.option.hypothesis_seed}"


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory):
    """No test reads or writes the profiles of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("MDCS_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def own_cache(no_cache_of_the_user, monkeypatch):
    """Nor those of another test; a folder is made when one is kept, as most tests keep none."""
    monkeypatch.setenv("MDCS_CACHE", str(no_cache_of_the_user / str(next(NUMBERS))))
