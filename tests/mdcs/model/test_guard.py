"""Memory of parameters that modules hold elsewhere, too: found wherever it is kept, and told from memory of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mdcs.model.guard import attributes_over_parameters, still_held


@dataclass(slots=True)
class Kept:
    table: Any


class Plain:
    def __init__(self, table: Any) -> None:
        self.table = table


class Outside(nn.Module):
    """Not registered by whoever keeps it in a list."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.register_buffer("table", table)


def closing_over(table: Any) -> Callable[[], Any]:
    return lambda: table


KEEPERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda table: table,
    "list of dictionaries": lambda table: [{"a": (1, table)}],
    "dataclass with slots": Kept,
    "object": lambda table: {"kept": [Plain(table)]},
    "closure": closing_over,
    "partial": lambda table: functools.partial(torch.add, table),
    "default": lambda table: (lambda x, t=table: x + t),
    "method": lambda table: closing_over(Plain(table).__init__),
    "module that is not registered": lambda table: [Outside(table)],
}


def model_with(kept: Callable[[nn.Linear], Any]) -> nn.Module:
    linear = nn.Linear(4, 3)
    model = nn.Sequential(nn.Linear(4, 4), linear)
    vars(model[0])["kept"] = kept(linear)  # past __setattr__, which registers parameters
    return model


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda w: w.data,
    "slice": lambda w: w.detach()[1:, 2],
    "transposed": lambda w: w.t(),
    "expanded": lambda w: w.expand(2, 3, 4),
    "as numbers": lambda w: torch.from_numpy(w.detach().numpy()),
}


@pytest.mark.parametrize(
    ("keeper", "view"), [*((keeper, "slice") for keeper in KEEPERS), *(("attribute", view) for view in VIEWS if view != "slice")]
)
def test_a_view_of_a_weight_is_found_wherever_a_module_keeps_it(keeper: str, view: str) -> None:
    model = model_with(lambda linear: KEEPERS[keeper](VIEWS[view](linear.weight)))
    found = attributes_over_parameters(model)
    assert {(alias.path, alias.parameter) for alias in found} == {("0.kept", "1.weight")}
    assert still_held(model, found) == found[0]


@pytest.mark.parametrize("keeper", KEEPERS)
def test_a_copy_and_the_parameter_itself_are_no_aliases(keeper: str) -> None:
    assert attributes_over_parameters(model_with(lambda linear: KEEPERS[keeper](linear.weight.detach().clone()))) == []
    if keeper != "module that is not registered":
        assert attributes_over_parameters(model_with(lambda linear: KEEPERS[keeper](linear.weight))) == []


def test_what_a_hook_closes_over_is_found() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    table = model[1].weight.data
    model[0].register_forward_hook(lambda module, args, out: out + table[0])
    assert [alias.parameter for alias in attributes_over_parameters(model)] == ["1.weight"]


def test_neighbours_in_one_tensor_are_no_aliases() -> None:
    flat = torch.zeros(12)
    model = nn.Linear(4, 2, bias=False)
    model.weight = nn.Parameter(flat[:8].view(2, 4))
    model.rest = flat[8:]
    assert attributes_over_parameters(model) == []
    model.rest = flat[7:]
    assert [alias.path for alias in attributes_over_parameters(model)] == ["rest"]


def test_what_forward_makes_anew_is_not_held_any_more() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 3)))  # type: ignore[no-untyped-call]
    found = attributes_over_parameters(model)
    assert [(alias.path, alias.parameter) for alias in found] == [("1.weight", "1.weight_orig")]
    model(torch.ones(2, 4))
    assert still_held(model, found) is None
