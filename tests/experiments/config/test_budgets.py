"""Budgets in words mean the same in every program: as `budget=`, and in lists of a program."""

import pytest

from experiments.config.schema import BudgetConfig, ConfigError
from experiments.job.planning import budget_bytes, job_of
from mdcs.planner.pipeline import unsharded_bytes
from tests.experiments.config.test_config import composed
from tests.experiments.test_plan import PROFILE


@pytest.mark.parametrize(
    ("typed", "budget"),
    [("40GiB", BudgetConfig(gib=40)), ("0.5 GiB", BudgetConfig(gib=0.5)), ("300MiB", BudgetConfig(gib=300 / 1024)),
     ("75% of ddp", BudgetConfig(of_ddp=0.75)), ("75%", BudgetConfig(of_ddp=0.75)),
     ("floor+10%", BudgetConfig(over_floor=0.1)), ("none", BudgetConfig())],
)  # fmt: skip
def test_a_budget_is_typed_in_words(typed, budget):
    assert composed(f"budget={typed}").budget == budget


def test_a_part_of_ddp_is_of_the_job():
    config = composed("budget=75% of ddp", "model=mlp", "data=digits", "strategy=fsdp")
    job = job_of(config, PROFILE)
    assert budget_bytes(config, None, None) is None
    assert budget_bytes(config, None, job) == int(0.75 * unsharded_bytes(job))


@pytest.mark.parametrize(
    ("typed", "key"),
    [("budget=fast", "budget"), ("budget=40", "budget"), ("budget=-1GiB", "budget"),
     ("tradeoff.budgets=[floor+10%,x]", "tradeoff.budgets"),
     ("compare.budgets=[floor+10%,2 apples]", "compare.budgets"), ("tradeoff.budgets=[300MiB,none]", "tradeoff.budgets")],
)  # fmt: skip
def test_what_is_no_budget_is_said_by_its_key(typed, key):
    with pytest.raises(ConfigError) as refused:
        composed(typed)
    assert refused.value.key == key
