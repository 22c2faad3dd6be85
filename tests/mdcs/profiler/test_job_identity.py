"""Profiles of a loop are kept by all that they depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import mdcs
from mdcs.model.optimizers import Optimizers
from mdcs.profiler.first_passes import FirstPasses, described, key_of_job


def key(
    width: int = 4, dropout: float = 0.1, cast: bool = False, batch: int = 3, change: Callable[[nn.Module], Any] | None = None,
    **options: Any,
) -> str:  # fmt: skip
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(dropout), nn.Linear(width, 2))
    if change is not None:
        change(model)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), **{"lr": 0.1} | options)
    units = mdcs.partition(model)
    with mdcs.parallelize(model, optimizer, profiles=False, progress=False) as parallel:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            model(torch.zeros(batch, 4)).sum().backward()
        first = parallel._heard
        assert isinstance(first, FirstPasses)
        return key_of_job(model, units, Optimizers(optimizer), first.in_words())


@pytest.fixture(scope="module")
def plain() -> str:
    return key()


def test_a_second_start_has_the_key_of_the_first_whatever_its_rate_and_weights_are(plain: str) -> None:
    assert plain == key(lr=0.5)


@pytest.mark.parametrize(
    "other",
    [
        {"width": 5}, {"dropout": 0.2}, {"batch": 4}, {"cast": True}, {"weight_decay": 0.5}, {"amsgrad": True},
        {"change": lambda model: model[0].requires_grad_(False)}, {"change": lambda model: setattr(model[1], "heads", 2)},
        {"change": lambda model: model.eval()},
    ],
    ids=lambda other: next(iter(other)) if callable(next(iter(other.values()))) else str(other),
)  # fmt: skip
def test_what_a_profile_depends_on_makes_another_key(plain: str, other: dict[str, Any]) -> None:
    assert key(**other) != plain


def test_threads_and_code_count(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdcs.profile.cache.version", lambda package: "another")
    assert key() != plain
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert key() != plain


@dataclass
class Options:
    heads: int


class Unknown:
    """An object whose words would differ from start to start."""


def test_values_in_words() -> None:
    assert described({"x": torch.zeros(2, 3), "on": True}) == "{x: torch.float32 [2, 3] cpu, on: True}"
    assert described([1, (None, "a")]) == "(1, (None, 'a'))"
    assert described(Options(2)) == "Options(heads=2)" and described(Unknown()) == ""
