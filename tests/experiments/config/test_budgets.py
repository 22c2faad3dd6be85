"""Budgets in words."""

import pytest

from experiments.config.budgets import Budget
from experiments.config.schema import ConfigError
from tests.experiments.config.test_config import composed


@pytest.mark.parametrize(
    ("words", "size"),
    [("none", None), ("10%", 1100), ("0%", 1000), ("0.5GiB", 1 << 29), ("1.5GiB", 3 << 29), ("300MiB", 300 << 20)],
)
def test_words_are_bytes_of_a_rank(words, size):
    assert Budget.parse(words).bytes(1000) == size


@pytest.mark.parametrize("words", ["", "x", "-1", "0", "0.5", "2", "0MiB", "1.2.3", "300MB", "10 %%", "inf", "nan", "1e999"])
def test_what_is_no_budget_is_said(words):
    with pytest.raises(ValueError, match=r"a budget is 10% .*, with its unit; got "):
        Budget.parse(words)


@pytest.mark.parametrize(
    ("asked", "why"),
    [("tradeoff.budgets=[10%,0.1]", "a budget is .*, with its unit; got 0.1"),
     ("compare.budgets=[10%,2]", "a budget is .*, with its unit; got 2"),
     ("tradeoff.budgets=[300MiB,none]", "are those of the front, each a limit; got none")],
)  # fmt: skip
def test_a_budget_has_its_unit_in_every_program(asked, why):
    with pytest.raises(ConfigError, match=f"^{asked.partition('=')[0]}: {why}"):
        composed(asked)
