"""The drawing of one period in the docs."""

import pytest

import mdcs
from docs.period import CLUSTER, GPU, MODEL, panel
from experiments.job.analytic import analytic_profile


@pytest.mark.slow
def test_the_drawn_plan_of_the_larger_budget_is_the_faster_one():
    job = mdcs.Job(analytic_profile(MODEL, GPU, CLUSTER, depth=2))
    tight, roomy = panel(job, 0.02), panel(job, 0.4)
    assert tight.headline.startswith("budget 6.7 GiB (least possible + 2%): 7 × fsdp") and roomy.period_s < tight.period_s
