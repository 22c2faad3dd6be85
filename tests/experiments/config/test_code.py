"""The code of an option's class: what it is made of is another one once it has changed, wherever in its project."""

import importlib
import sys

import pytest

from experiments.config.identity import code_of

MODEL = """
from __future__ import annotations
from typing import TYPE_CHECKING
from theirs.base import Base
if TYPE_CHECKING:
    import theirs.types

class Model(Base):
    def make(self):
        from . import layers
        import numpy
        return layers.Layer(4)
"""


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """A package of somebody's: a function that writes files of it and returns the code of its model."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        for name in [each for each in sys.modules if each.partition(".")[0] == "theirs"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()
        return code_of(importlib.import_module("theirs.model").Model)

    write.first = lambda: write(
        __init__="", model=MODEL, base="class Base: ...", layers="class Layer: size = 1", types="", other="x = 1"
    )
    return write


@pytest.mark.parametrize(
    "change",
    [
        {"model": MODEL.replace("Layer(4)", "Layer(8)")},
        {"base": "class Base: kept = True"},
        {"layers": "class Layer: size = 2"},
        {"layers": "from theirs.inner import size\nclass Layer: ...", "inner": "size = 2"},
        {"__init__": "x = 1"},
    ],
)
def test_a_change_of_the_class_or_of_what_it_imports_is_other_code(theirs, change):
    assert theirs.first() != theirs(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"model": MODEL.replace("class Model", "# a comment\n\nclass Model").replace("Layer(4)", "Layer( 4 )")},
        {"other": "x = 2"},
        {"types": "x = 2"},
        {},
    ],
)
def test_comments_layout_types_and_what_is_not_imported_do_not_count(theirs, change):
    assert theirs.first() == theirs(**change)


def test_the_version_of_an_installed_package_counts(theirs, monkeypatch):
    before = theirs.first()
    monkeypatch.setattr("mdcs.profile.cache.version", lambda package: "another")
    assert theirs() != before


def test_nothing_is_imported_for_it(theirs):
    theirs.first()
    assert "theirs.layers" not in sys.modules
