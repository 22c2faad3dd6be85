"""Budgets in words."""

from __future__ import annotations

from typing import Any

import pytest

from mdcs.sizes import Share, budget_of


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None), (1024, 1024), ("1024", 1024), ("40 GiB", 40 * 2**30), ("1.5gib", 3 * 2**29), ("512 MB", 512 * 10**6),
        (" .5 KiB ", 512), ("30%", Share(0.3)), ("62.5 %", Share(0.625)),
    ],
)  # fmt: skip
def test_budgets_are_bytes_sizes_or_a_part_of_what_ddp_needs(given: Any, meant: Any) -> None:
    assert budget_of(given) == meant


@pytest.mark.parametrize("given", [0, -1, True, 0.3, "", "GiB", "0%", "-5%", "40 lbs", "1e9"])
def test_other_budgets_are_refused_with_examples(given: Any) -> None:
    with pytest.raises(ValueError, match=r"such as 6 \* 2\*\*20, a size, such as '40 GiB', or a part .* such as '70%'; got "):
        budget_of(given)


def test_a_share_is_of_the_whole() -> None:
    assert Share(0.7).of(1000) == 700
