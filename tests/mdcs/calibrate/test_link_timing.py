"""α and β of a link, from times made by hand; measured between real ranks in tests/mdcs/runtime/test_communicator.py."""

from __future__ import annotations

import pytest

from mdcs.calibrate.link_timing import _alpha_beta


def test_alpha_and_beta_are_a_line_over_bytes() -> None:
    assert _alpha_beta([(b, 1e-3 + 2e-8 * b) for b in (2**16, 2**18, 2**20)]) == pytest.approx((1e-3, 2e-8))


def test_without_latency_beta_is_what_more_bytes_cost() -> None:
    # Large messages at a worse rate: 1 s for the first unit, 3 s for the second.
    assert _alpha_beta([(1, 1.0), (2, 4.0)]) == pytest.approx((0, 3))


def test_times_that_fall_with_size_are_latency() -> None:
    assert _alpha_beta([(1, 3.0), (2, 1.0)]) == pytest.approx((2, 0))
