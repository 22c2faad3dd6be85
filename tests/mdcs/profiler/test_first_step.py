"""The loop's first step: kept so that the model's passes can be run again without knowing the loop's loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.model.optimizers import Optimizers
from mdcs.profiler.first_step import FirstStep
from mdcs.runtime.errors import RunError
from mdcs.runtime.validation import RunOptions


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


def two_losses(net: Net) -> None:
    output = net(batch(0))
    output["logits"].mean().backward(retain_graph=True)
    output["hidden"].square().mean().backward()


def of_parts(net: Net) -> None:
    hidden = net.first(batch(0)).tanh()
    (net.last(hidden).square().mean() + hidden.sum()).backward()


def in_a_checkpoint(net: Net) -> None:
    logits: Tensor = checkpoint(lambda x: net(x)["logits"], batch(0).requires_grad_(), use_reentrant=True)
    logits.square().mean().backward()


def of_parts_in_checkpoints(net: Net) -> None:
    hidden = checkpoint(net.first, batch(0).requires_grad_(), use_reentrant=True).tanh()
    checkpoint(net.last, hidden, use_reentrant=True).square().mean().backward()


def in_bfloat16(net: Net) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(batch(0))["logits"].float().square().mean()
    loss.backward()


def begun(clip_norm: float | None = None) -> tuple[Net, torch.optim.Optimizer, FirstStep]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, FirstStep(net, Optimizers(optimizer), RunOptions(clip_norm=clip_norm), [net.first, net.last])


@pytest.mark.parametrize(
    "passes",
    [one_output, two_outputs, two_calls, two_losses, of_parts, in_a_checkpoint, of_parts_in_checkpoints, in_bfloat16],
)
def test_the_passes_of_a_step_are_run_again_with_the_same_gradients(passes: Callable[[Net], None]) -> None:
    net, _, first = begun()
    passes(net)
    wanted = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    for p in net.parameters():
        p.grad = None
    first.stop()
    first.again().backward()
    assert first.micro_steps == (2 if passes is two_losses else 1)
    for ours, theirs in zip((p.grad for p in net.parameters()), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_loss_that_the_loop_holds_does_not_hold_the_batch() -> None:
    net, _, first = begun()
    x = batch(0)
    held, loss = ref(x), net(x)["logits"].square().mean()
    loss.backward()
    first.finish()
    del x
    assert held() is not None and first.again() is not None
    first.forget()
    assert held() is None and loss.requires_grad


class Casts(TorchDispatchMode):
    """Counts the copies of weights in another type."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.count, self._places = 0, {p.data_ptr() for p in net.parameters()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            self.count += args[0].data_ptr() in self._places
        return function(*args, **kwargs or {})


def in_contexts(net: Net, *calls: int, enabled: bool = True) -> None:
    """Call the net so often in each of the autocast contexts; in a nested one from the second call on."""
    losses = []
    for number in calls:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            for call in range(number):
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled) if call else nullcontext():
                    losses.append(net(batch(call))["logits"].float().square().mean())
    sum(losses).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("calls", "enabled", "casts"), [((1,), True, 4), ((2,), True, 4), ((1, 1), True, 8), ((3, 2), True, 8), ((2,), False, 0)]
)
def test_weights_are_cast_as_often_as_in_the_loop(calls: tuple[int, ...], enabled: bool, casts: int) -> None:
    """Autocast keeps the copies within one context: in contexts of their own the passes would hold more of them."""
    net, _, first = begun()
    with Casts(net) as theirs:
        in_contexts(net, *calls, enabled=enabled)
    first.stop()
    with Casts(net) as ours:
        first.again().backward()
    assert (theirs.count, ours.count) == (casts, casts)


def test_micro_steps_are_counted_and_passes_without_gradients_are_none() -> None:
    net, _, first = begun()
    with torch.no_grad():
        net(batch(7))
    for seed in range(3):
        net(batch(seed))["logits"].mean().backward()
    assert first.micro_steps == 3


def test_it_ends_as_a_plain_step() -> None:
    (net, _, first), (twin, theirs, _) = begun(clip_norm=0.1), begun()
    for model in (net, twin):
        two_outputs(model)
    first.finish()
    wanted = nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    theirs.step()
    assert first.norm == float(wanted) and all(p.grad is None for p in net.parameters())
    assert all(map(torch.equal, net.parameters(), twin.parameters()))
    assert not net._forward_hooks and not net._forward_pre_hooks


def test_a_scaled_step_is_a_plain_one_and_an_overflow_is_left_out() -> None:
    (net, optimizer, first), (twin, theirs, plain) = begun(), begun()
    plain.stop()
    first.stop()
    scale = mdcs.LossScale(value=4.0, growth_interval=1)
    before = net.last.weight.clone()
    for step, factor in ((1, float("inf")), (2, 1.0)):
        scaled = FirstStep(net, Optimizers(optimizer), RunOptions(loss_scale=scale))
        (net(batch(0))["logits"].mean() * scale.value * factor).backward()
        scaled.finish()
        assert scale.value == 2.0 * step and scale.skipped == 1
        assert torch.equal(net.last.weight, before) == (step == 1)
    twin(batch(0))["logits"].mean().backward()
    theirs.step()
    assert all(map(torch.equal, net.parameters(), twin.parameters()))


@pytest.mark.parametrize(
    ("habit", "told"),
    [
        (lambda net: None, "step() needs a forward and a backward pass before it"),
        (lambda net: net.first.weight.sum().backward(), "loss must come from the outputs of model(…), or of its layers"),
        (lambda net: net(batch(0))["logits"].mean(), "step() needs a forward and a backward pass"),
    ],
)
def test_a_step_without_passes_of_the_model_is_refused(habit: Callable[[Net], Any], told: str) -> None:
    net, _, first = begun()
    habit(net)
    with pytest.raises(RunError, match="rank 0, step 1: ") as refused:
        first.finish()
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "habit",
    [
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1e-3),
        lambda net: net.zero_grad(),
        lambda net: net.first.weight.grad.mul_(2),
    ],
)
def test_gradients_that_the_loop_changes_are_refused_as_in_later_steps(habit: Callable[[Net], Any]) -> None:
    net, _, first = begun()
    one_output(net)
    habit(net)
    with pytest.raises(RunError, match=r"gradient of first.weight was changed by the loop. Clip with .*clip_norm="):
        first.finish()


def test_an_iteration_is_given_up() -> None:
    net, _, first = begun()
    one_output(net)
    first.forget()
    assert first.micro_steps == 0 and net.first.weight.grad is None
    two_outputs(net)
    first.finish()


# ---- without a plan


def test_what_needs_a_plan_says_so() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="init= needs a plan, made before the loop: mdcs.autoplan"):
        mdcs.parallelize(net, optimizer, init=lambda module: None)
    with pytest.raises(ValueError, match="budget must be a size, such as .*; got '40 lbs'"):
        mdcs.parallelize(net, optimizer, budget="40 lbs")
    with pytest.raises(ValueError, match="the plan has a budget already"):
        mdcs.parallelize(net, optimizer, SimpleNamespace(), budget=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="micro_steps= is for a plan that is made here"):
        mdcs.parallelize(net, optimizer, SimpleNamespace(), micro_steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("budget", ["60%", "floor+10%"])
def test_a_part_is_refused_where_activations_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, budget: str) -> None:
    net = Net()
    optimizer, units = torch.optim.Adam(net.parameters()), mdcs.partition(net)
    monkeypatch.setattr("mdcs.api.autoplan.unmeasured", lambda device: "there is no compiler: install one")
    with pytest.raises(ValueError, match="depends on the bytes of activations: .* install one, or give the budget in bytes"):
        mdcs.parallelize(net, optimizer, budget=budget)
    with pytest.raises(ValueError, match="depends on the bytes of activations"):
        mdcs.autoplan(net, optimizer, units, lambda: net(batch(0))["logits"].mean(), budget=budget, progress=False)
    mdcs.parallelize(net, optimizer, budget="1GiB", progress=False).close()


def test_until_the_first_step_the_model_is_plain_and_the_choice_of_units_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    with mdcs.parallelize(net, optimizer) as parallel:
        assert caplog.messages == ["2 units: first, last"]
        with parallel.evaluate():
            assert not net(batch(0))["logits"].requires_grad
        parallel.load_state_dict(parallel.state_dict(cpu=True))
        optimizer.load_state_dict(optimizer.state_dict())
        with parallel.full_parameters(writeback=True):
            nn.init.zeros_(net.first.weight)
        assert parallel.steps == 0 and parallel.records() == [] and parallel.grad_norm is None
        with pytest.raises(RunError, match="there is no plan before the end of this step, which is measured for it"):
            parallel.memory()
    assert not net._forward_hooks and not vars(optimizer).keys() & {"step", "state_dict"}


def test_one_process_plans_in_its_loop_too() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(net.parameters())
    with mdcs.parallelize(net, optimizer, seconds=0.2, progress=False) as parallel:
        for _ in range(3):
            net(batch(0)).square().mean().backward()
            optimizer.step()
    assert parallel.steps == 3 and next(iter(optimizer.state.values()))["step"] == 3
