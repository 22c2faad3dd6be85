"""Compilation of the replay loops by numba. Without numba they run as Python, only slower."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mdcs.plan import ledger, schedule
from mdcs.simulator import kernel

Fields = TypeVar(
    "Fields", kernel.PeriodArrays, kernel.ReplayArrays, schedule.Schedule, schedule.MessageTable,
    schedule.MessageSeconds, schedule.SizeTable, schedule.Folded,
)  # fmt: skip

_SECONDS = {
    *("seconds", "early", "ready", *schedule.MessageSeconds._fields),
    *(name for name in kernel.ReplayArrays._fields if name != "count"),
}  # fmt: skip


_is_compiled = False


class Loops(NamedTuple):
    """The loops that a search calls for each candidate."""

    arrange: Callable[..., int]
    fold_seconds: Callable[..., None]
    fold_bytes: Callable[..., None]
    fill_demands: Callable[..., None]
    run: Callable[..., int]


def compiled_loops() -> Loops:
    """Return the loops, compiled for the rest of this process if numba is installed.

    Plans are arranged and folded as Python, because copying the lists of one plan takes longer. Their replays are
    compiled from here on. The first compilation on a machine takes some ten seconds. Numba caches the code next to the
    modules, or in the user's cache; where neither can be written, every process compiles.
    """
    global _is_compiled
    if not _is_compiled:
        with contextlib.suppress(ImportError):  # not installed, or not for this numpy
            for loop in kernel.LOOPS:
                setattr(kernel, loop.__name__, _compiled(loop))  # they call each other
            _is_compiled = True
    if not _is_compiled:
        return Loops(schedule.arrange, schedule.fold_seconds, schedule.fold_bytes, ledger.fill_demands, kernel.run)
    return Loops(
        _compiled(schedule.arrange), _compiled(schedule.fold_seconds), _compiled(schedule.fold_bytes),
        _compiled(ledger.fill_demands), kernel.run,
    )  # fmt: skip


@cache
def _compiled(loop: Callable[..., Any]) -> Callable[..., Any]:
    import numba

    _drop_outdated(Path(loop.__code__.co_filename))
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, error_model="numpy")(loop)
    except RuntimeError:  # no folder for the cache
        compiled = numba.njit(error_model="numpy")(loop)
    return compiled


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
