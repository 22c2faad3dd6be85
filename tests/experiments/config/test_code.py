"""The code of an option's class: what it is made of is another one once a file beside it has changed."""

import importlib
import sys

import pytest

from experiments.config.identity import code_of

MODEL = "from theirs.base import Base\nclass Model(Base): ..."
FILES = {"__init__": "", "model": MODEL, "base": "class Base: ...", "layers": "x = 1"}


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A package of somebody's: a function that writes files of it and returns the code of its model."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**files):
        for name, text in (FILES | files).items():
            (folder / f"{name}.py").write_text(text)
        for name in [each for each in sys.modules if each.partition(".")[0] == "theirs"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return code_of(importlib.import_module("theirs.model").Model)

    return write


@pytest.mark.parametrize("name", FILES)
def test_a_change_of_a_file_beside_the_class_is_other_code(theirs, name):
    before = theirs()
    assert theirs() == before != theirs(**{name: f"{FILES[name]}\ny = 1"})


def test_the_version_of_an_installed_package_counts(monkeypatch):
    before = code_of(pytest.Item)
    monkeypatch.setattr("mdcs.profile.cache.version", lambda package: "another")
    assert code_of(pytest.Item) != before


def test_the_librarys_own_classes_do_not_count():
    from mdcs.planner.priority import Priority
    from mdcs.planner.strategies import Greedy

    assert code_of(Priority) == code_of(Greedy)
