"""Ranks that are forks of one process, for jobs of which a test looks at something else than their start."""

from collections.abc import Iterator

import pytest

from launch.elastic import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    with Warm() as started:
        yield started
