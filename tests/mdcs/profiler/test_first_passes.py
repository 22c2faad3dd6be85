"""The loop's first step: how many backward passes it has, and what is refused in it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.runtime.errors import RunError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, add: float = 0.0) -> dict[str, Tensor]:
        hidden = self.first(x).tanh() + add
        return {"hidden": 1.0 * hidden, "logits": self.last(hidden)}


def batch(seed: int) -> Tensor:
    return torch.rand(5, 4, generator=torch.Generator().manual_seed(seed))


def one_output(net: Net) -> None:
    net(batch(0), add=0.5)["logits"].square().mean().backward()


def two_outputs(net: Net) -> None:
    output = net(batch(0))
    (output["logits"].square().mean() + output["hidden"].sum()).backward()


def two_calls(net: Net) -> None:
    (net(batch(0))["logits"] * net(batch(1))["logits"]).sum().backward()


def of_parts(net: Net) -> None:
    hidden = net.first(batch(0)).tanh()
    (net.last(hidden).square().mean() + hidden.sum()).backward()


def of_parts_in_checkpoints(net: Net) -> None:
    hidden = checkpoint(net.first, batch(0).requires_grad_(), use_reentrant=True).tanh()
    checkpoint(net.last, hidden, use_reentrant=True).square().mean().backward()


def in_bfloat16(net: Net) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(batch(0))["logits"].float().square().mean()
    loss.backward()


def begun(**options: Any) -> tuple[Net, mdcs.Session]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, mdcs.parallelize(net, optimizer, profiles=False, progress=False, seconds=0.2, **options)


@pytest.mark.parametrize("passes", [one_output, two_outputs, two_calls, of_parts, of_parts_in_checkpoints, in_bfloat16])
def test_the_passes_of_a_step_are_counted_and_train_as_in_a_plain_step(passes: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    twin = Net()
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    net, parallel = begun()
    with parallel:
        for _ in range(5):
            passes(net)
            parallel.step()
            passes(twin)
            theirs.step()
            theirs.zero_grad()
            assert parallel.plan.micro_steps == 1
    for ours, plain in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_loss_that_the_loop_holds_does_not_hold_the_batch() -> None:
    net, parallel = begun()
    with parallel:
        x = batch(0)
        held, loss = ref(x), net(x)["logits"].square().mean()
        loss.backward()
        parallel.step()
        del x
        gc.collect()
        assert held() is None and loss.requires_grad


def test_passes_without_gradients_and_those_in_no_sync_are_not_counted() -> None:
    net, parallel = begun()
    with parallel:
        with torch.no_grad():
            net(batch(7))
        with parallel.no_sync(), parallel.no_sync():
            one_output(net)
        penalty = torch.autograd.grad(net(batch(3))["logits"].mean(), net.first.weight)[0]
        for seed in range(3):
            net(batch(seed))["logits"].mean().backward()
        parallel.step()
        assert parallel.plan.micro_steps == 3 and penalty.isfinite().all()


@pytest.mark.parametrize("habit", [lambda net: None, lambda net: net(batch(0))["logits"].mean()])
def test_a_step_without_passes_of_the_model_is_refused(habit: Callable[[Net], Any]) -> None:
    net, parallel = begun()
    habit(net)
    with pytest.raises(RunError, match="rank 0, step 1: step.. needs a forward and a backward pass"):
        parallel.step()
    parallel.close()


@pytest.mark.parametrize(
    "habit",
    [
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
        lambda net: net.zero_grad(),
        lambda net: net.first.weight.grad.mul_(2),
    ],
)
def test_gradients_that_the_loop_changes_are_refused_as_in_later_steps(habit: Callable[[Net], Any]) -> None:
    net, parallel = begun()
    one_output(net)
    habit(net)
    with pytest.raises(RunError, match=r"gradient of first.weight was changed by the loop. Clip with .*clip_norm="):
        parallel.step()
    parallel.close()


def test_an_iteration_is_given_up() -> None:
    net, parallel = begun()
    with parallel:
        one_output(net)
        parallel.abandon()
        assert net.first.weight.grad is None
        two_outputs(net)
        parallel.step()
        assert parallel.plan.micro_steps == 1


# ---- without a plan


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (None, {"init": lambda module: None}, "init= needs a plan, made before the loop: mdcs.autoplan"),
        (None, {"budget": "40 lbs"}, "budget must be a size, such as .*; got '40 lbs'"),
        (None, {"micro_steps": 0}, "micro_steps must be >= 1, got 0"),
        (None, {"recompute": "some"}, "unknown recompute 'some'"),
        (object(), {"budget": 1}, "the plan has a budget already"),
        (object(), {"micro_steps": 2}, "micro_steps= is for a plan that is made here"),
        (object(), {"recompute": "all"}, r"recompute= is for a plan that is made here: mdcs\.autoplan\(recompute=\)"),
    ],
)
def test_options_that_contradict_the_plan_or_themselves_are_refused(plan: Any, options: dict[str, Any], message: str) -> None:
    net = Net()
    with pytest.raises(ValueError, match=message):
        mdcs.parallelize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan, **options)


@pytest.mark.parametrize("budget", ["60%", "floor+10%"])
def test_a_part_is_refused_where_activations_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    net = Net()
    optimizer, units = torch.optim.Adam(net.parameters()), mdcs.partition(net)
    monkeypatch.setattr("mdcs.api.loop_plan.unmeasured", lambda device: "there is no compiler: install one")
    with pytest.raises(ValueError, match="depends on the bytes of activations: .* install one, or give the budget in bytes"):
        mdcs.parallelize(net, optimizer, budget=budget)
    with pytest.raises(ValueError, match="depends on the bytes of activations"):
        mdcs.autoplan(net, optimizer, units, lambda: net(batch(0))["logits"].mean(), budget=budget, progress=False)
    mdcs.parallelize(net, optimizer, budget="1GiB", progress=False).close()


def test_what_a_loop_may_do_before_its_first_step_and_the_units_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with mdcs.parallelize(net, optimizer) as parallel:
        assert caplog.messages[0] == "2 units: first, last"
        with parallel.evaluate():
            assert not net(batch(0))["logits"].requires_grad
        parallel.load_state_dict(parallel.state_dict(cpu=True))
        optimizer.load_state_dict(optimizer.state_dict())
        with parallel.full_parameters(writeback=True):
            nn.init.zeros_(net.first.weight)
        assert parallel.steps == 0 and parallel.records() == [] and parallel.grad_norm is None
        assert parallel.is_choosing and parallel.explain() == ""
    assert not net._forward_hooks and not vars(optimizer).keys() & {"step", "state_dict"}
