"""Profiles on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdcs.profile import cache
from tests.mdcs.profiles import chain


def test_a_kept_profile_is_read_again_and_others_are_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "key.json"
    cache.keep(chain(8, 8), path)
    assert cache.read(path) == chain(8, 8) and [each.name for each in path.parent.iterdir()] == ["key.json"]
    path.write_text("{")
    assert cache.read(path) is None and cache.read(tmp_path / "other.json") is None


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="the profile is not kept for later jobs: .*file"):
        cache.keep(chain(8, 8), tmp_path / "file" / "key.json")


def test_a_key_depends_on_every_part() -> None:
    assert cache.key_of({"a": "1", "b": "2"}) == cache.key_of({"b": "2", "a": "1"}) != cache.key_of({"a": "1"})
