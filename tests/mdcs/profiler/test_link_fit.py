"""Least squares on random rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mdcs.profiler.link_fit import Term, estimate


def rows(seed: int, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Fifty rows of three columns, with coefficients 2, 0 and 0.5."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 10, (50, 3)) * [1, 1e6, 1]
    return x, x @ [2, 0, 0.5] + rng.normal(0, noise, 50)


TERMS = [Term("a", 7.0), Term("b", 7.0), Term("c", 7.0)]


@pytest.mark.parametrize("seed", range(10))
def test_coefficients_and_standard_errors_are_those_of_least_squares(seed: int) -> None:
    x, y = rows(seed)
    found, other = estimate(TERMS, x, y), x[:, [0, 2]]
    assert found.values["b"] == 0 < found.errors["b"] < 1e-6  # not significantly above 0
    (a, c), [squares], *_ = np.linalg.lstsq(other, y)
    error = np.sqrt(squares / 48 * np.diag(np.linalg.inv(other.T @ other)))
    assert (found.values["a"], found.values["c"]) == pytest.approx((a, c), rel=0.02)
    assert (found.errors["a"], found.errors["c"]) == pytest.approx(error, rel=0.3)


def test_few_rows_that_are_far_off_hardly_count() -> None:
    x, y = rows(0)
    y[::10] += 100.0
    found = estimate(TERMS, x, y)
    assert (found.values["a"], found.values["c"]) == pytest.approx((2, 0.5), rel=0.1)


def test_what_the_rows_do_not_tell_stays_at_its_prior() -> None:
    x, y = rows(0)
    same, nothing = x.copy(), x.copy()
    same[:, 0], nothing[:, 0] = x[:, 2], 0.0  # told apart from the third by nothing; never there
    for each in (same, nothing):
        found = estimate(TERMS, each, each @ [2, 0, 0.5])
        assert found.values["a"] == 7.0 and "a" not in found.errors
    rate = estimate([TERMS[0], replace(TERMS[1], is_effect=False), TERMS[2]], x, y)
    assert rate.values["b"] == 7.0 and "b" not in rate.errors  # a rate is never 0
    assert estimate(TERMS, x[:0], y[:0]).values == estimate(TERMS, x[:2], y[:2], means=2).values == dict.fromkeys("abc", 7.0)


@pytest.mark.parametrize("seed", range(3))
def test_an_effect_that_may_be_as_large_as_its_prior_stays_at_it(seed: int) -> None:
    x, y = rows(seed)
    error = estimate(TERMS, x, y).errors["b"]
    for prior, stays in ((error, True), (100 * error, False)):
        found = estimate([TERMS[0], Term("b", prior), TERMS[2]], x, y)
        assert found.values["b"] == (prior if stays else 0.0) and "b" in found.errors
