"""Optimizers that can run on shards, and the state that they keep there, are found out by trying them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from mdcs.model.elementwise import StateLayout, state_layouts
from mdcs.model.flat_optimizer import Counts
from mdcs.model.units import UnsupportedModel
from tests.mdcs.optimizers import (
    OPTIMIZERS,
    Blockwise,
    ByHand,
    ByRow,
    ByRowOfLarge,
    Counting,
    Joint,
    Lamb,
    OwnCount,
    Remembering,
    Sending,
    Shampoo,
    Stacking,
)  # fmt: skip
from tests.mdcs.runtime.ranks import Ranks


def state_layout(optimizer: optim.Optimizer) -> StateLayout:
    """The state of an optimizer whose groups are all updated in one way."""
    [(_, layout)] = state_layouts(optimizer)
    return layout


def parameters() -> list[nn.Parameter]:
    return [*nn.Sequential(nn.Linear(3, 4), nn.Conv2d(2, 2, 3)).parameters()]


STATE: dict[str, tuple[set[str], set[str], int]] = {
    "rmsprop": ({"square_avg", "grad_avg", "momentum_buffer"}, {"step"}, 4),
    "adagrad": ({"sum"}, {"step"}, 4),
    "nadam": ({"exp_avg", "exp_avg_sq"}, {"step", "mu_product"}, 8),
    "radam": ({"exp_avg", "exp_avg_sq"}, {"step"}, 4),
    "adamax": ({"exp_avg", "exp_inf"}, {"step"}, 4),
    "adadelta": ({"square_avg", "acc_delta"}, {"step"}, 4),
    "asgd": ({"ax"}, {"step", "eta", "mu"}, 12),
    "rprop": ({"prev", "step_size"}, {"step"}, 4),
    "lion": ({"exp_avg"}, {"count"}, 0),
    "subclass": ({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"step"}, 4),
}


@pytest.mark.parametrize("name", STATE)
def test_the_state_of_a_shard_is_found(name: str):
    per_element, replicated, fixed = STATE[name]
    found = state_layout(OPTIMIZERS[name](parameters()))
    assert (set(found.per_element), found.replicated, found.fixed) == (per_element, replicated, fixed)
    assert found.tensors(4) == len(per_element)
    assert found.plain == {"count"} & replicated


def test_the_trial_of_a_known_optimizer_would_find_what_is_known(monkeypatch: pytest.MonkeyPatch):
    ours = parameters()
    for made in (optim.SGD(ours, momentum=0.9), optim.Adam(ours, amsgrad=True), optim.AdamW(ours, fused=True)):
        known = state_layout(made)
        with monkeypatch.context() as patch:
            patch.setattr("mdcs.model.elementwise.FUNCTIONAL", ())
            tried = state_layout(made)
        assert (known.per_element, known.replicated, known.fixed) == (tried.per_element, tried.replicated, tried.fixed)


class Wide(optim.SGD):
    """Its state is in float32, whatever its parameters are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("sum", torch.zeros_like(p, dtype=torch.float32)).add_(p.grad)
                p.add_(self.state[p]["sum"].to(p.dtype), alpha=-group["lr"])


def test_state_may_have_a_type_of_its_own():
    found = state_layout(Wide(parameters()))
    assert found.per_element == {"sum": torch.float32} and (found.tensors(2), found.tensors(4)) == (2, 1)


class Listing(Shampoo):
    """Its state is a list of tensors, as that of PSGD's Kron."""

    def update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(p, gradient, group)
        self.state[p]["both"] = [self.state[p]["left"], self.state[p]["right"]]


class Adapting(Counting):
    """Its group has an estimate of the distance to go, as that of Prodigy."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = group.get("d", 0.0) + sum(float(p.grad.norm()) for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


class ByParameter(ByHand):
    """It counts the parameters that it has updated."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    def update(self, p: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        self.steps += 1
        p.sub_(gradient, alpha=group["lr"] / self.steps)


REFUSED: dict[str, tuple[Callable[[list[nn.Parameter]], optim.Optimizer], str]] = {
    "Joint": (Joint, "a parameter differs when updated alone"),
    "LBFGS": (optim.LBFGS, "its step() needs a closure"),
    "SparseAdam": (optim.SparseAdam, "does not support dense gradients"),
    "Adapting": (Adapting, "its step() changes d of its parameter groups, in another way for each piece"),
    "ByParameter": (ByParameter, "its step() changes its attribute steps, in another way for each piece"),
    "Stacking": (lambda ps: Stacking([ps[0], nn.Parameter(ps[0].data)]), "put each into a parameter group of its own"),
    "Listing": (lambda ps: Listing([p for p in ps if p.dim() == 2]), "its state both is a list, neither a tensor nor a number"),
    "Remembering": (Remembering, "its last differs when a parameter is updated alone"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_on_shards_is_refused_with_its_reason(name: str):
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=f"optimizer {name}: .*{reason.replace('(', '.').replace(')', '.')}"):
        state_layout(make(parameters()))


WHOLE: dict[str, tuple[Callable[[list[nn.Parameter]], optim.Optimizer], set[str], set[str]]] = {
    "adafactor": (optim.Adafactor, {"variance"}, {"step", "row_var", "col_var"}),
    "lamb": (Lamb, {"exp_avg"}, {"count"}),
    "muon": (lambda ps: optim.Muon([p for p in ps if p.dim() == 2]), {"momentum_buffer"}, set()),
    "shampoo": (lambda ps: Shampoo([p for p in ps if p.dim() == 2]), set(), {"left", "right"}),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_needs_whole_parameters_is_found(name: str):
    make, per_element, replicated = WHOLE[name]
    found = state_layout(make(parameters()))
    assert found.whole and (set(found.per_element), found.replicated) == (per_element, replicated)


@pytest.mark.parametrize("make", [Blockwise, ByRowOfLarge, lambda ps: ByRowOfLarge(ps, factored=True)])
@pytest.mark.parametrize(("shape", "whole"), [((12, 16), False), ((72, 72), True), ((50257, 768), True)])
def test_an_optimizer_is_tried_on_sizes_that_the_model_has(make: Any, shape: tuple[int, int], whole: bool):
    model = nn.Parameter(torch.empty(shape, device="meta"))
    assert state_layout(make([model])).whole is whole


def test_no_piece_makes_a_large_square():
    """Shampoo's matrix of a flat piece with as many elements as this model would have 32 GB."""
    assert state_layout(Shampoo([nn.Parameter(torch.empty(300, 300, device="meta"))])).whole


def test_many_small_parameters_are_one_long_piece_of_a_unit():
    assert state_layout(Blockwise([nn.Parameter(torch.zeros(64)) for _ in range(70)])).whole


@torch.compile(dynamic=False, fullgraph=True)
def compiled(p: torch.Tensor, gradient: torch.Tensor) -> None:
    p.sub_(gradient.sign())


class Compiled(optim.SGD):
    """As nanochat's: its update is compiled as one graph."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                compiled(p, p.grad)


def test_a_trial_compiles_nothing():
    assert not state_layout(Compiled(parameters())).whole


class Clipped(optim.AdamW):
    """Clips each parameter alone, at a norm that gradients of 64 numbers around 1 do not have."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            nn.utils.clip_grad_norm_([p], 100.0)
        return super().step(closure)


def test_limits_of_gradients_are_found_wherever_they_are():
    assert state_layout(Clipped([nn.Parameter(torch.zeros(64))])).whole


@pytest.mark.parametrize("make", [OwnCount, lambda ps: OwnCount(ps, since=1000), Counting])
def test_a_count_of_steps_is_found(make: Any):
    found = state_layout(make(parameters()))
    assert found.counts and not found.whole


def test_counts_move_on_once_for_all_groups():
    optimizer = OwnCount([{"params": parameters()}, {"params": []}])
    counts = Counts(optimizer)
    for steps in (1, 2):
        counts.look_ahead()
        counts.look_ahead()  # of an iteration that was dropped
        counts.move_on()
        assert optimizer.steps == {"made": steps}


def test_each_matrix_may_have_a_group_of_its_own_where_groups_are_stacked():
    matrices = [nn.Parameter(torch.zeros(6, 4)) for _ in range(3)]
    found = state_layout(Stacking([{"params": [p]} for p in matrices]))
    assert found.whole and found.replicated == {"momentum"}


def test_groups_of_one_optimizer_may_be_updated_in_two_ways():
    """As optimizers that are published as one class: Muon for some groups, AdamW for the others."""
    ours = parameters()
    groups = [{"params": [p for p in ours if p.dim() != 2]}, {"params": [p for p in ours if p.dim() == 2], "by_row": True}]
    layouts = state_layouts(ByRow(groups, lr=0.1))
    assert [(members, layout.whole) for members, layout in layouts] == [((0,), False), ((1,), True)]


def test_a_norm_of_a_vector_counts_only_where_there_are_vectors():
    """An optimizer is tried on the shapes that it has: this one treats matrices alone as wholes."""
    biases = [p for p in parameters() if p.dim() == 1]
    assert not state_layout(ByRow(biases, lr=0.1, by_row=True)).whole
    assert state_layout(ByRow(parameters(), lr=0.1, by_row=True)).whole


def test_a_trial_changes_nothing():
    ours = parameters()
    made = OPTIMIZERS["rprop"](ours)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.0)  # a schedule that begins with 0
    before, numbers = [p.detach().clone() for p in ours], torch.get_rng_state()
    state_layout(made)
    assert all(torch.equal(p, b) for p, b in zip(ours, before, strict=True))
    assert torch.equal(torch.get_rng_state(), numbers) and not made.state and made.param_groups[0]["lr"] == 0.0


def sends() -> str:
    with pytest.raises(UnsupportedModel) as refusal:
        state_layout(Sending(parameters()))
    return str(refusal.value)


def test_an_optimizer_that_sends_is_refused_before_it_does(two: Ranks):
    assert all("Sending: its step() sends messages" in said for said in two.run(sends))
