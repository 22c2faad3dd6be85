"""Compilation of the replay loops by numba. Without numba they run as Python, only slower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mdcs.simulator import arrange, kernel

Fields = TypeVar("Fields", kernel.PeriodArrays, kernel.MessageArrays, kernel.ReplayArrays, arrange.MessageTable)

_SECONDS = {
    *("seconds", "early", "alpha", "gap", "transfer", "copy", "update", "idle", "lost", "lost_per_work"),
    *(name for name in kernel.ReplayArrays._fields if name != "count"),
}  # fmt: skip


_is_compiled = False


def compile_loops() -> bool:
    """Compile the loops for the rest of this process. Return whether numba is installed.

    The first compilation on a machine takes some ten seconds. Numba caches the code next to the modules, or in the
    user's cache; where neither can be written, every process compiles.
    """
    global _is_compiled
    if not _is_compiled:
        try:
            import numba
        except ImportError:  # not installed, or not for this numpy
            return False
        for module in (kernel, arrange):
            _drop_outdated(Path(str(module.__file__)))
            loops: tuple[Callable[..., Any], ...] = module.LOOPS
            for loop in loops:
                try:
                    compiled = numba.njit(cache=True, error_model="numpy")(loop)
                except RuntimeError:  # no folder for the cache
                    compiled = numba.njit(error_model="numpy")(loop)
                setattr(module, loop.__name__, compiled)
        _is_compiled = True
    return True


def _drop_outdated(source: Path) -> None:
    """Delete numba's caches of an older source. Numba fails to read those that name classes that are gone."""
    for index in source.parent.glob(f"__pycache__/{source.stem}.*.nbi"):
        with contextlib.suppress(OSError):
            if index.stat().st_mtime < source.stat().st_mtime:
                index.unlink()


def for_loops(fields: Fields) -> Fields:
    """Return a copy whose sequences have the type that the loops take: arrays if compiled, otherwise lists."""
    columns = {name: v for name, v in fields._asdict().items() if isinstance(v, (list, tuple))}
    return fields._replace(**{name: numbers(v, seconds=name in _SECONDS) for name, v in columns.items()})


def numbers(values: Sequence[float], *, seconds: bool = False) -> Any:
    """Return numbers in the type that the loops take. ``seconds``: floats instead of integers."""
    if not _is_compiled:
        return list(values)
    return np.array(values, np.float64 if seconds else np.int64)
