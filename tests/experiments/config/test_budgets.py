"""Budgets in words mean the same in every program: as `budget=`, and in lists of a program."""

import pytest

from experiments.config.schema import BudgetConfig, ConfigError
from experiments.job.profiles import budget_bytes, job_of
from mdcs.planner.pipeline import unsharded_bytes
from tests.experiments.config.test_config import composed
from tests.experiments.test_plan import PROFILE


@pytest.mark.parametrize(
    ("typed", "limit"),
    [("budget=0.5 GiB", "0.5GiB"), ("budget=512MiB", "0.5GiB"), ("budget.limit='75% of ddp'", "75% of ddp"),
     ("budget=75%", "75% of ddp"), ("budget=floor+10%", "floor+10%"), ("budget=none", "none"),
     ("budget=12.3456789%", "12.3456789% of ddp")],
)  # fmt: skip
def test_a_budget_is_typed_in_words(typed, limit):
    """Equal budgets have one text, for they are one job. (What words there are: tests/mdcs/test_sizes.py.)"""
    assert composed(typed).budget == BudgetConfig(limit)


def test_a_part_of_ddp_is_of_the_job():
    config = composed("budget=75% of ddp", "model=mlp", "data=digits", "strategy=fsdp")
    job = job_of(config, PROFILE)
    assert budget_bytes(config, None, None) is None
    assert budget_bytes(config, None, job) == int(0.75 * unsharded_bytes(job))


@pytest.mark.parametrize(
    ("typed", "key"),
    [("budget=fast", "budget"), ("curve.budgets=[floor+10%,x]", "curve.budgets"),
     ("compare.budgets=[floor+10%,2 apples]", "compare.budgets"), ("curve.budgets=[300MiB,none]", "curve.budgets")],
)  # fmt: skip
def test_what_is_no_budget_is_said_by_its_key(typed, key):
    with pytest.raises(ConfigError) as refused:
        composed(typed)
    assert refused.value.key == key
