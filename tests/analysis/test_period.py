"""The drawing of one period in the docs: plans that keep their budgets, and a page that shows them."""

import json
import re
from pathlib import Path

import pytest

from tests.analysis import browser

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_drawn_plans_keep_their_budgets_and_more_memory_is_faster():
    assert (DOCS / "period.html").stat().st_size < 600e3
    text = (DOCS / "period.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text)[1])
    assert set(data["plans"]) == {"sequential", "wfbp", "priority"}
    for plans in data["plans"].values():
        assert len(plans) == len(data["budgets"])
        assert plans[-1]["step"] < plans[0]["step"]
        for plan, budget in zip(plans, data["budgets"], strict=True):
            assert plan["peak"] <= budget + 1e-6
            assert max(sum(slot) for slot in plan["memory"]) >= plan["peak"] - len(data["categories"])
            assert max(end for row, *_, end in plan["intervals"] if row == 0) == pytest.approx(plan["step"], abs=0.01)


@pytest.mark.skipif(browser.PROGRAM is None, reason="needs Chromium")
def test_moving_the_budget_changes_what_is_drawn(tmp_path):
    with browser.browser(tmp_path / "profile") as page:
        page.open(DOCS / "period.html")
        seen = set()
        for budget in (0, 4, 10):
            page.value(f"budget.value = {budget}; budget.dispatchEvent(new Event('input'))")
            seen.add((page.value("numbers.textContent"), page.value("drawing.querySelectorAll('rect').length")))
        assert len(seen) == 3
        assert page.errors == []
