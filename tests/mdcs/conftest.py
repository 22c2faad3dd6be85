"""Ranks shared by all tests of the library: starting a process costs seconds, a call to it milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mdcs.profiler import model_profile
from tests.mdcs.runtime.ranks import Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """More ranks than two share two cores."""
    for item in items:
        if {"three", "four"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def hasty() -> Iterator[None]:
    """Measure the seconds of updates on little memory: no test needs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_profile, "_CACHES", 1 << 16)
        patch.setattr(model_profile, "_LONG", 1 << 14)
        yield


def _pool(world: int) -> Iterator[Ranks]:
    ranks = Ranks(world)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def single() -> Iterator[Ranks]:
    yield from _pool(1)


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    yield from _pool(2)


@pytest.fixture(scope="session")
def three() -> Iterator[Ranks]:
    yield from _pool(3)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Ranks]:
    """Two nodes of two ranks, if a profile says so. Its tests tell themselves which are slow."""
    yield from _pool(4)


@pytest.fixture(scope="session")
def four(nodes: Ranks) -> Ranks:
    return nodes
