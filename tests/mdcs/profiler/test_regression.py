"""Lines and spreads: hand-computed cases, and the textbook's formulas on random points."""

from __future__ import annotations

import math
import random

import pytest

from mdcs.profiler.regression import least_squares, lower_envelope, nonneg_line_fit, p10_p90


def test_a_line_of_relative_errors_has_no_negative_part() -> None:
    assert nonneg_line_fit([(1, 3.0), (2, 5.0), (100, 201.0)], relative=True) == pytest.approx((1, 2))
    # A large message that is 10 % off hardly moves what a small one costs.
    a, b = nonneg_line_fit([(1, 3.0), (2, 5.0), (1000, 2201.0)], relative=True)
    assert a + b == pytest.approx(3, rel=0.1)
    assert nonneg_line_fit([(1, 2.0), (2, 1.0)], relative=True) == (pytest.approx(1.2), 0)
    assert nonneg_line_fit([(1, 1.0), (2, 4.0)], relative=True).intercept == 0
    assert nonneg_line_fit([(1, 0.0)], relative=True) == (0, 0)


def test_the_highest_line_below_all_points_is_not_moved_by_what_disturbances_add() -> None:
    true = [(x, 1 + 2 * x) for x in (1.0, 4.0, 16.0)]
    assert lower_envelope(true) == pytest.approx((1, 2))
    for disturbed in range(2):  # a small or a middle size, in all turns
        points = [(x, y * (1.5 if i == disturbed else 1)) for i, (x, y) in enumerate(true)]
        assert lower_envelope(points).slope == pytest.approx(2, rel=0.05)
    assert lower_envelope([*true[:2], (16.0, 50.0)]).slope == pytest.approx(2.25)  # the largest: then there is no intercept
    assert lower_envelope([*true, *((x, 1.1 * y) for x, y in true)]) == pytest.approx((1, 2))  # one turn


def test_a_line_below_has_no_negative_part() -> None:
    assert lower_envelope([(1, 1.0), (2, 4.0), (3, 9.0)]) == (0, 1)
    assert lower_envelope([(1, 3.0), (2, 1.0)]) == (1, 0)
    assert lower_envelope([(2, 4.0), (2, 5.0)]) == (0, 2)
    assert lower_envelope([]) == (0, 0)


def test_what_is_waited_longer_is_a_line_over_the_number_of_waits() -> None:
    assert nonneg_line_fit([(2, 0.7), (10, 1.5), (20, 2.5)]) == pytest.approx((0.5, 0.1))
    assert nonneg_line_fit([(2, 0.0), (10, 1.0), (20, 2.0)]).intercept == 0  # never less than nothing
    assert nonneg_line_fit([(2, 2.0), (20, 1.0)]) == (1.5, 0)
    assert nonneg_line_fit([(5, -1.0), (5, -1.0)]) == nonneg_line_fit([(0, -1.0), (0, -2.0)]) == (0, 0)
    assert nonneg_line_fit([(0, 1.0), (0, 2.0)]) == (1.5, 0)


def test_points_that_differ_by_rounding_alone_have_no_slope() -> None:
    assert nonneg_line_fit([(3.0, 1.0), (3.0 + 1e-12, 2.0)]) == (1.5, 0)
    assert nonneg_line_fit([(3.0, 1.0), (3.01, 2.0)]).slope == pytest.approx(0.5, rel=0.01)  # through the origin


def textbook(points: list[tuple[float, float]], weights: list[float]) -> tuple[float, float]:
    """(intercept, slope) of weighted least squares: means, then covariance by variance."""
    total = math.fsum(weights)
    mean_x = math.fsum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = math.fsum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    covariance = math.fsum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = covariance / math.fsum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    return mean_y - slope * mean_x, slope


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_lines_are_the_textbooks_and_the_best_that_are_not_negative(seed: int, relative: bool) -> None:
    rng = random.Random(seed)
    sizes = [2.0**k for k in rng.sample(range(16, 23), 4)]  # bytes, and seconds of messages with -1 to 2 ms of latency
    points = [(x, max(1e-5, rng.uniform(-1e-3, 2e-3) + x * 1e-8 * rng.uniform(0.5, 1.5))) for x in sizes]
    weights = [y**-2 if relative else 1.0 for _, y in points]
    free, found = textbook(points, weights), nonneg_line_fit(points, relative=relative)
    assert least_squares(points, relative=relative) == pytest.approx(free, rel=1e-6)

    def error(a: float, b: float) -> float:
        return math.fsum(w * (y - a - b * x) ** 2 for w, (x, y) in zip(weights, points, strict=True))

    if min(free) >= 0:
        assert found == pytest.approx(free, rel=1e-6)
    assert min(found) >= 0
    best = error(*found)
    for a in (found.intercept - 1e-5, found.intercept, found.intercept + 1e-5):
        for b in (found.slope * 0.99, found.slope, found.slope * 1.01, found.slope + 1e-10):
            assert a < 0 or error(a, b) >= best * (1 - 1e-9)


def test_the_spread_is_that_of_the_samples() -> None:
    assert p10_p90([3.0]) == (3.0, 3.0)
    assert p10_p90([float(x) for x in range(11)]) == (1.0, 9.0)
    assert p10_p90([2.0, 1.0]) == pytest.approx((1.1, 1.9))
