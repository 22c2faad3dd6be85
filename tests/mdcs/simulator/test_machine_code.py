"""Machine code of the replay loops."""

import os
from pathlib import Path

from mdcs.simulator.machine_code import _drop_outdated


def test_numbas_caches_of_an_older_source_are_deleted_and_no_others(tmp_path: Path) -> None:
    source, caches = tmp_path / "kernel.py", tmp_path / "__pycache__"
    caches.mkdir()
    names = ("kernel.run-1.py311.nbi", "kernel.walk-9.py311.nbi", "engine.run-1.py311.nbi", "kernel.cpython-311.pyc")
    for at, file in enumerate((caches / names[0], source, *(caches / name for name in names[1:]))):
        file.touch()
        os.utime(file, (at, 0 if file.name == names[2] else at))
    _drop_outdated(source)
    assert {file.name for file in caches.iterdir()} == set(names[1:])


def test_without_caches_nothing_is_deleted(tmp_path: Path) -> None:
    source = tmp_path / "kernel.py"
    source.touch()
    _drop_outdated(source)
    assert list(tmp_path.iterdir()) == [source]
