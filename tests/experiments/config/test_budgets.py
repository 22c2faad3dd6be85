"""Budgets in words."""

import pytest

from experiments.config.budgets import Budget, on_front
from experiments.config.schema import ConfigError
from tests.experiments.config.test_config import composed


@pytest.mark.parametrize(
    ("words", "size"),
    [("none", None), ("10%", 1100), ("0%", 1000), ("0.5", 1 << 29), ("1.5GiB", 3 << 29), ("300MiB", 300 << 20)],
)
def test_words_are_bytes_of_a_rank(words, size):
    assert Budget.parse(words).bytes(1000) == size


@pytest.mark.parametrize("words", ["", "x", "-1", "0", "0MiB", "1.2.3", "300MB", "10 %%", "inf", "nan", "1e999"])
def test_what_is_no_budget_is_said(words):
    with pytest.raises(ValueError, match=r"a budget is 300MiB, 1.5GiB, .*; got "):
        Budget.parse(words)


def test_the_front_takes_shares_and_bytes():
    config = composed("tradeoff.budgets=[0.1,2,300MiB,5%]")
    assert [on_front(b).bytes(1000) for b in config.tradeoff.budgets] == [1100, 3000, 300 << 20, 1050]


@pytest.mark.parametrize(
    ("asked", "why"),
    [("[0.1,-0.2]", "a share of the floor beyond it must be >= 0, got -0.2"), ("[3GB]", "a budget is .*; got 3GB"),
     ("[none]", "the front is over budgets, got none"), ("[true]", "a budget is .*; got True")],
)  # fmt: skip
def test_what_the_front_does_not_take_is_said_with_its_key(asked, why):
    with pytest.raises(ConfigError, match=f"tradeoff.budgets.*{why}"):
        composed(f"tradeoff.budgets={asked}")
