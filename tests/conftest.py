"""What holds for all tests."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_cache_of_the_user(tmp_path_factory):
    """No test reads or writes the profiles of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MDCS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MDCS_CACHE", str(tmp_path_factory.mktemp("cache")))
