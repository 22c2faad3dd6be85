"""Fits of measured points: robust least squares with standard errors, and percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-9  # of the largest y: errors below it are rounding
_INFLATION = 50.0  # of a coefficient's variance: above it, other columns can stand for its own
_SIGNIFICANT = 3.0  # standard errors above 0
_HUBER, _PASSES = 4.0, 12  # deviations from which on a row counts less; passes of reweighting
_NORMAL = 0.6745  # median of absolute errors, in standard deviations


class Line(NamedTuple):
    """y = ``intercept`` + ``slope`` · x, in the units of y, and of y per x."""

    intercept: float
    slope: float


class Estimates(NamedTuple):
    """Coefficients of a linear model, by name.

    - ``values``: where the rows do not determine a coefficient, its prior.
    - ``errors``: standard errors of the coefficients that are determined.
    """

    values: dict[str, float]
    errors: dict[str, float]


@dataclass(frozen=True)
class Term:
    """A coefficient of a linear model, at least 0.

    - ``prior``: its value where the rows do not determine it.
    - ``is_effect``: a coefficient that is not significantly above 0 is 0. Otherwise it then stays at its prior.
    """

    name: str
    prior: float = 0.0
    is_effect: bool = True


def estimate(terms: Sequence[Term], x: np.ndarray, y: np.ndarray, means: int = 0) -> Estimates:
    """Return the coefficients of y = x · coefficients. Rows that are far from the fit count less.

    The rows do not determine a coefficient if its column is 0, or if the other columns can stand for it. Of several
    columns that can stand for each other, the first is the one that stays at its prior.

    - ``x`` [rows, terms], ``y`` [rows]: with errors of about the same size in all rows.
    - ``means``: means that were subtracted from rows.
    """
    values, errors = {term.name: term.prior for term in terms}, dict[str, float]()
    free = [j for j in range(len(terms)) if np.abs(x[:, j]).max(initial=0.0) > 0]
    del free[: max(0, len(free) + means + 1 - len(y))]
    while (tied := _tied(x[:, free])) is not None:
        del free[tied]
    while free:
        known = np.array([0.0 if j in free else values[term.name] for j, term in enumerate(terms)])
        found, deviations = _robust(x[:, free], y - x @ known, means)
        weakest = int(np.argmin(found / deviations))
        if found[weakest] >= _SIGNIFICANT * deviations[weakest]:
            values |= {terms[j].name: float(value) for j, value in zip(free, found, strict=True)}
            errors |= {terms[j].name: float(each) for j, each in zip(free, deviations, strict=True)}
            break
        term = terms[free.pop(weakest)]
        if term.is_effect:
            values[term.name], errors[term.name] = 0.0, float(deviations[weakest])
    return Estimates(values, errors)


def _tied(x: np.ndarray) -> int | None:
    """Return the first column that the others can stand for, or None."""
    if x.shape[1] < 2:
        return None
    scaled = x / np.linalg.norm(x, axis=0)
    values, vectors = np.linalg.eigh(scaled.T @ scaled)
    inflation = (vectors**2 / np.maximum(values, 1e-12)).sum(axis=1)
    tied = np.flatnonzero(inflation > _INFLATION)
    return int(tied[0]) if tied.size else None


def _robust(x: np.ndarray, y: np.ndarray, means: int) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients and their standard errors, by least squares with Huber's weights."""
    sizes = np.linalg.norm(x, axis=0)  # columns of very different sizes, as bytes beside numbers
    x, weights = x / sizes, np.ones_like(y)
    for _ in range(_PASSES):
        weighted = x * weights[:, None]
        found = np.linalg.solve(weighted.T @ x, weighted.T @ y)  # columns that others can stand for are not in x
        off = np.abs(y - x @ found)
        scale = max(float(np.median(off)) / _NORMAL, _ROUNDING * float(np.abs(y).max()), 1e-100)
        weights = 1 / np.maximum(1.0, off / (_HUBER * scale))
    freedom = max(1.0, float(weights.sum()) - x.shape[1] - means)
    variance = max(float((weights * off**2).sum()) / freedom, scale**2)
    inverse = np.linalg.inv((x * weights[:, None]).T @ x)
    return found / sizes, np.sqrt(variance * np.diag(inverse)) / sizes


def p10_p90(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile, interpolated."""
    low, high = np.percentile(samples, (10, 90)).tolist()
    return low, high
