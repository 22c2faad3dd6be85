"""Fits of measured points: lines by least squares, the spread by percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-6
"""Points whose x differ by less than this fraction of the largest x count as equal: their slope would be noise."""


class Line(NamedTuple):
    """y = ``intercept`` + ``slope`` · x, in the units of y, and of y per x."""

    intercept: float
    slope: float


def least_squares(points: Sequence[tuple[float, float]], *, relative: bool = False) -> Line:
    """Return the least-squares line through (x, y) ``points``; level if all x are equal, 0 without points.

    ``relative``: minimise errors as fractions of y, over points with y > 0. x that differ by rounding alone are equal.
    """
    x, y, weights = _columns(points, relative)
    if not x.size:
        return Line(0.0, 0.0)
    if x.max() - x.min() <= _ROUNDING * np.abs(x).max():
        return Line(float(np.average(y, weights=weights**2)), 0.0)
    slope, intercept = np.polyfit(x, y, 1, w=weights).tolist()
    return Line(intercept, slope)


def nonneg_line_fit(points: Sequence[tuple[float, float]], *, relative: bool = False) -> Line:
    """Return the least-squares line with neither intercept nor slope below 0, for x >= 0.

    Non-negative least squares in two variables: where one would be negative, it is 0 and the other is fitted alone.
    """
    free = least_squares(points, relative=relative)
    if min(free) >= 0:
        return free
    x, y, weights = _columns(points, relative)
    if free.slope <= 0:
        return Line(max(0.0, float(np.average(y, weights=weights**2))), 0.0)
    x, y = weights * x, weights * y
    return Line(0.0, max(0.0, float((x @ y) / (x @ x))))


def lower_envelope(points: Sequence[tuple[float, float]]) -> Line:
    """Return the highest line with no point below it and neither intercept nor slope below 0.

    For samples to which disturbances only add. Maximises Σ intercept + slope · x, a linear program in two variables, by
    trying its corners: lines through two points, through one point and the origin, level through one point. For x and y
    above 0; (0, 0) without points.
    """
    x, y, _ = _columns(points, relative=False)
    if not x.size:
        return Line(0.0, 0.0)
    corners = [Line(0.0, float((y / x).min())), Line(float(y.min()), 0.0)]
    for i, j in zip(*np.triu_indices(len(x), 1), strict=True):
        if x[i] != x[j]:
            slope = float((y[j] - y[i]) / (x[j] - x[i]))
            corners.append(Line(float(y[i] - slope * x[i]), slope))
    possible = (c for c in corners if min(c) >= 0 and (c.intercept + c.slope * x <= y * (1 + 1e-9)).all())
    return max(possible, key=lambda c: float((c.intercept + c.slope * x).sum()))


def p10_p90(samples: Sequence[float]) -> tuple[float, float]:
    """Return the 10th and 90th percentile, interpolated."""
    low, high = np.percentile(samples, (10, 90)).tolist()
    return low, high


def _columns(points: Sequence[tuple[float, float]], relative: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x, y and the weights of the errors."""
    x, y = np.array(points, dtype=float).reshape(-1, 2).T
    if not relative:
        return x, y, np.ones_like(y)
    positive = y > 0
    return x[positive], y[positive], 1 / y[positive]
