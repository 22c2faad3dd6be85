"""Hydra, for all tests of a module."""

import pytest

from experiments.config import checks


@pytest.fixture(autouse=True, scope="module")
def composing():
    """Once for all: to initialize Hydra takes half as long as to compose."""
    with checks.composing():
        yield
