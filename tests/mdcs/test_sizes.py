"""Budgets in words."""

from __future__ import annotations

from typing import Any

import pytest

from mdcs.sizes import Budget


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (None, None), ("none", None), (1024, 1024), ("1024", 1024), ("40 GiB", 40 * 2**30), ("1.5gib", 3 * 2**29),
        ("512 MB", 512 * 10**6), (" .5 KiB ", 512), ("30%", 300), ("62.5 %", 625), ("75% of ddp", 750), ("120 % of DDP", 1200),
        ("floor+10%", 220), ("floor + 0 %", 200), (Budget(over_floor=0.5), 300),
    ],
)  # fmt: skip
def test_a_budget_is_a_size_a_part_of_ddp_or_a_part_over_the_floor(given: Any, meant: Any) -> None:
    found = Budget.of(given)
    assert found.bytes(lambda: 1000, lambda: 200) == meant
    assert Budget.of(str(found)) == found


def test_only_what_a_budget_is_relative_to_is_computed() -> None:
    def never() -> int:
        raise AssertionError

    assert Budget.of("50%").bytes(lambda: 10, never) == 5 and Budget.of("floor+50%").bytes(never, lambda: 10) == 15
    assert Budget.of("1KiB").bytes(never, never) == 1024 and Budget.of("none").bytes(never, never) is None


@pytest.mark.parametrize(
    "given", [0, -1, True, 0.3, "", "GiB", "0%", "-5%", "40 lbs", "1e999%", "0.5", "floor", "floor+", "floor+1GiB", "1GiB of ddp",
              "floor+10% of ddp", "10% of floor", "10%%", "nan", "1.2.3"]
)  # fmt: skip
def test_other_budgets_are_refused_with_examples(given: Any) -> None:
    with pytest.raises(ValueError, match=r"such as 40GiB, .* such as 75% of ddp, .* such as floor\+10%, or none; got "):
        Budget.of(given)
