"""Hooks: in which order the slots of real models come."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mdcs.model.hooks import Hooks
from mdcs.model.units import ByClass, ByLeaf, ModelUnit, UnsupportedModel, WrapPolicy, partition


class Log:
    """Events that a listener is told: ``a(`` and ``)`` around a forward, ``a*`` backward, ``a+`` a gradient, ``a~``
    recomputed, ``end``. In side passes with a ``-``."""

    def __init__(self, units: list[ModelUnit]) -> None:
        self.units, self.events = units, list[str]()
        self.accumulates = False

    def name(self, unit: int) -> str:
        return self.units[unit].name

    def forward_begin(self, unit: int) -> None:
        self.events.append(f"{self.name(unit)}(")

    def forward_end(self, unit: int) -> None:
        self.events.append(")")

    def backward_begin(self, unit: int) -> None:
        self.events.append(f"{self.name(unit)}*")

    def used_outside(self, unit: int, is_side: bool) -> None:
        self.events.append(f"{self.name(unit)}!")

    def recomputed(self, unit: int) -> None:
        self.events.append(f"{self.name(unit)}~")

    def gradient(self, unit: int, index: int, parameter: nn.Parameter) -> None:
        assert self.units[unit].parameters[index][1] is parameter
        assert parameter.grad is not None
        self.events.append(f"{self.name(unit)}+")

    def backward_end(self) -> None:
        self.events.append("end")

    def side_begin(self, unit: int, in_backward: bool) -> None:
        self.events.append(f"{self.name(unit)}{'-*' if in_backward else '-('}")

    def side_end(self, unit: int) -> None:
        self.events.append("-)")

    def side_backward_end(self) -> None:
        self.events.append("-end")

    def take(self) -> str:
        events, self.events = self.events, []
        return " ".join(events)


def hooked(model: nn.Module, policy: WrapPolicy | None = None) -> tuple[Log, Hooks]:
    units = partition(model, policy or ByLeaf())
    log = Log(units)
    return log, Hooks(units, log)


def linear() -> nn.Linear:
    return nn.Linear(3, 3, bias=False)


class Net(nn.Module):
    """Modules a, b, c, called in the order of ``calls``."""

    def __init__(self, calls: str, **modules: nn.Module) -> None:
        super().__init__()
        self.calls = calls
        for name in sorted({*calls}):
            self.add_module(name, modules.get(name) or linear())

    def forward(self, x: Tensor) -> Tensor:
        for name in self.calls:
            x = self.get_submodule(name)(x)
        return x


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 3)).square().sum()


class Block(nn.Module):
    """A parameter of its own, used before and after the layer inside."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(3)), linear()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x * self.scale) * self.scale
        return result


def layers_around_one(frozen: str) -> nn.Module:
    model = nn.Sequential(linear(), nn.LayerNorm(3), linear())
    model.get_parameter(frozen).requires_grad_(False)
    return model


def frozen(model: nn.Module, *names: str) -> nn.Module:
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def tied_ends() -> nn.Module:
    model = Net("abc")
    model.get_submodule("c").weight = model.get_submodule("a").weight
    return model


STEPS: dict[str, tuple[Callable[[], nn.Module], WrapPolicy | None, str]] = {
    "a chain": (lambda: Net("abc"), None, "a( ) b( ) c( ) c* c+ b* b+ a* a+ end"),
    # Units around one module run in their order and back, as others do: so a plan of slots in the order of the units, made
    # before a pass has run, is followed.
    "units around one module": (
        lambda: layers_around_one("1.bias"), None, "0( ) 1( 1[frozen]( ) ) 2( ) 2* 2+ 1[frozen]* 1* 1+ 0* 0+ end"
    ),
    "a module called twice has one gradient": (lambda: Net("aba"), None, "a( ) b( ) a( ) a* b* b+ a* a+ end"),
    "tied modules are uses of one unit": (tied_ends, None, "a+c( ) b( ) a+c( ) a+c* b* b+ a+c* a+c+ end"),
    "a nested unit runs inside": (
        lambda: Net("ab", a=Block()), None, "a( a.layer( ) ) b( ) b* b+ a* a.layer* a.layer+ a+ end"
    ),
    "wrapped blocks are one slot": (
        lambda: Net("ab", a=Block(), b=Block()), ByClass(("Block",)), "a( ) b( ) b* b+ b+ a* a+ a+ end"
    ),
    "frozen units have no gradient, and none flows through the first": (
        lambda: frozen(Net("abc"), "a", "c"), None, "a( ) b( ) c( ) c* b* b+ end"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_the_slots_of_a_step(name: str) -> None:
    make, policy, slots = STEPS[name]
    model = make()
    log, _ = hooked(model, policy)
    loss_of(model).backward()
    assert log.take() == slots


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), linear()

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.a, x, use_reentrant=False)
        x = checkpoint(self.b, x, use_reentrant=False)
        return self.c(x)


def test_a_recomputed_forward_is_part_of_the_backward_slot_it_runs_in() -> None:
    model = Checkpointed()
    log, _ = hooked(model, ByClass(("Block",)))
    loss = loss_of(model)
    assert log.take() == "a( ) b( ) c( )"
    loss.backward()
    assert log.take() == "c* c+ b* b~ b+ b+ a* a~ a+ a+ end"
    log, _ = hooked(model)
    loss_of(model).backward()
    inner = log.take()
    assert inner.startswith("a( a.layer( ) ) b( b.layer( ) ) c( ) c* c+ b* b~ b.layer~ ")
    assert inner.count("(") == 5 and inner.count("*") == 5  # the layers inside have their backward slots, too


def test_a_reentrant_checkpoint_runs_its_units_in_backward_slots_of_their_own() -> None:
    def run(body: Callable[[nn.Module, Tensor], Tensor], policy: WrapPolicy | None = None) -> str:
        model = Checkpointed()
        log, _ = hooked(model, policy)
        x = torch.ones(2, 3, requires_grad=True)
        model.c(body(model, x)).sum().backward()
        return log.take()

    def again(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out: Tensor = checkpoint(function, x, use_reentrant=True)
        return out

    blocks, forward = ByClass(("Block",)), "a( ) b( ) c( ) c* c+ "
    each = run(lambda model, x: again(model.b, again(model.a, x)), blocks)
    assert each == forward + "b* b~ b+ b+ a* a~ a+ a+ end"
    both = run(lambda model, x: again(lambda x: model.b(model.a(x)), x), blocks)
    assert both == forward + "a* a~ b* b~ b+ b+ a* a+ a+ end"
    nested = run(lambda model, x: again(lambda x: model.b(again(model.a, x)), x), blocks)
    assert nested == forward + "a~ b* b~ b+ b+ a* a~ a+ a+ end"
    twice = run(lambda model, x: again(model.a, again(model.a, x)), blocks)
    assert twice == "a( ) a( ) c( ) c* c+ a* a~ a+ a+ a~ a+ a+ end"
    leaves = run(lambda model, x: again(model.a, x))
    assert leaves == "a( a.layer( ) ) c( ) c* c+ a* a~ a.layer* a.layer~ a* a.layer* a.layer+ a+ end"


def test_two_forward_passes_have_one_backward_pass() -> None:
    model = Net("ab")
    log, _ = hooked(model)
    first, second = loss_of(model), loss_of(model)
    (first + second).backward()
    assert log.take() == "a( ) b( ) a( ) b( ) b* a* b* b+ a* a+ end"


def test_forward_passes_without_gradients_are_side_passes() -> None:
    model = Net("ab", a=Block())
    log, hooks = hooked(model)
    with torch.no_grad():
        loss_of(model)
    assert log.take() == "a-( a.layer-( -) -) b-( -)"
    assert not hooks.in_backward


def test_a_layer_without_gradients_inside_of_a_forward_is_one_of_its_slots() -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.layer(x)
            return super().forward(x)

    log, _ = hooked(model := Net("a", a=Twice()))
    loss_of(model).backward()
    assert log.take() == "a( a.layer( ) a.layer( ) ) a* a.layer* a.layer+ a+ end"


def test_gradients_that_are_not_the_parameters_are_those_of_a_side_pass() -> None:
    model, x = Net("ab"), torch.ones(2, 3, requires_grad=True)
    log, _ = hooked(model)
    torch.autograd.grad(model(x).sum(), x)
    assert log.take() == "a( ) b( ) b-* a-* -end"
    model.requires_grad_(False)
    model(x).sum().backward()
    assert log.take() == "a-( -) b-( -) b-* a-* -end"


def test_while_gradients_accumulate_all_passes_are_side_passes() -> None:
    model = Net("ab")
    log, _ = hooked(model)
    loss = loss_of(model)
    log.accumulates = True
    loss.backward(retain_graph=True)
    loss_of(model)
    assert log.take() == "a( ) b( ) b-* a-* -end a-( -) b-( -)"
    log.accumulates = False
    loss.backward()
    assert log.take() == "b* b+ a* a+ end"


def test_a_forward_that_raised_does_not_disturb_the_next() -> None:
    model = Net("ab", b=Block())
    log, _ = hooked(model)
    for context, seen in ((torch.no_grad, "a-( -) b-( b.layer-( -) -)"), (torch.enable_grad, "a( ) b( b.layer( ) )")):
        with context(), pytest.raises(RuntimeError), pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.get_submodule("b.layer"), "forward", lambda x: x @ torch.ones(7))
            loss_of(model)
        assert log.take() == seen
    loss_of(model)
    assert log.take() == "a( ) b( b.layer( ) )"


def test_frozen_units_have_slots_without_gradients_too() -> None:
    model = Net("ab")
    model.get_submodule("a").requires_grad_(False)
    log, _ = hooked(model)
    with torch.no_grad():
        x = model.get_submodule("a")(torch.ones(2, 3))
    model.get_submodule("b")(x).sum().backward()
    assert log.take() == "a( ) b( ) b* b+ end"


def test_a_second_backward_pass_of_a_forward_pass_is_told() -> None:
    model = Net("ab")
    log, _ = hooked(model)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    assert log.take() == "a( ) b( ) b* b+ a* a+ end"
    loss.backward()
    assert log.take() == "b* b+ a* a+ end"


def test_gradients_that_have_a_graph_are_refused() -> None:
    model = Net("a")
    hooked(model)
    with pytest.raises(UnsupportedModel, match=r"a.weight: backward\(create_graph=True\) is not supported"):
        loss_of(model).backward(create_graph=True)


@dataclass
class Output:
    one: Tensor
    more: Any = None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"one": x * self.weight, "more": [x + self.weight, (Output(x - self.weight), "text")]}


def test_an_output_of_several_tensors_begins_one_backward_slot() -> None:
    model = Two()
    log, _ = hooked(model)
    out = model(torch.ones(2, 3))
    (out["one"].sum() + out["more"][0].sum() + out["more"][1][0].one.sum()).backward()
    assert log.take() == "model( ) model* model+ end"


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("out of luck")


def test_a_backward_that_raised_does_not_disturb_the_next() -> None:
    model = Net("ab")
    log, hooks = hooked(model)
    x: Tensor = model.get_submodule("b")(Fails.apply(model.get_submodule("a")(torch.ones(2, 3))))
    with pytest.raises(RuntimeError, match="out of luck"):
        x.sum().backward()
    assert log.take() == "a( ) b( ) b* b+"
    assert not hooks.in_backward
    loss_of(model).backward()
    assert log.take() == "a( ) b( ) b* b+ a* a+ end"


def test_removed_hooks_are_silent() -> None:
    model = Net("ab")
    log, hooks = hooked(model)
    loss = loss_of(model)
    log.take()
    hooks.remove()
    loss_of(model).backward()
    assert log.take() == ""
    del loss, hooks
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_hooks_know_when_they_run_inside_backward() -> None:
    model = Net("a")
    _, hooks = hooked(model)
    seen = []
    model.get_submodule("a").weight.register_hook(lambda _: seen.append(hooks.in_backward))  # type: ignore[union-attr]
    loss_of(model).backward()
    assert seen == [True]
    assert not hooks.in_backward


def test_a_copy_drives_nothing_and_can_be_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    log, hooks = hooked(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(1, 2)).sum().backward()
        assert twin[0].weight.grad is not None
    hooks.remove()
    assert log.events == []
    assert len(model[0]._forward_hooks) == 0


# ---- compiled


class Graph(nn.Sequential):
    pass


def compiled_blocks(how: str) -> tuple[nn.Module, WrapPolicy]:
    torch._dynamo.reset()  # it would take another test's graph, without hooks, for a model of the same classes
    model = nn.Sequential(Graph(linear(), nn.Tanh()), linear())
    options: dict[str, Any] = {"backend": "eager", "fullgraph": True}
    if how == "forward":
        model[0].forward = torch.compile(model[0].forward, **options)
    elif how == "in place":
        model[0].compile(**options)
    else:
        model[0] = torch.compile(model[0], **options)
    return model, ByClass(("OptimizedModule" if how == "wrapped around" else "Graph",))


@pytest.mark.parametrize("how", ["wrapped around", "forward"])
def test_a_block_that_is_one_graph(how: str) -> None:
    model, policy = compiled_blocks(how)
    log, hooks = hooked(model, policy)
    model(torch.ones(1, 3)).sum().backward()
    assert log.take() == "0( ) 1( ) 1* 1+ 0* 0+ end"
    hooks.remove()


@pytest.mark.parametrize("how", ["wrapped inside", "in place"])
def test_a_graph_that_has_no_place_for_messages_is_refused_with_what_to_do(how: str) -> None:
    model, policy = compiled_blocks(how)
    _, hooks = hooked(model, policy)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r'mdcs sends messages .*ByClass\(\("OptimizedModule",\)\)'):
        model(torch.ones(1, 3))
    hooks.remove()


def test_a_step_that_is_compiled() -> None:
    model = nn.Sequential(linear(), linear())
    log, hooks = hooked(model)

    def step(x: Tensor) -> None:
        model(x).sum().backward()

    torch.compile(step, backend="eager")(torch.ones(1, 3))
    assert log.take() == "0( ) 1( ) 1* 1+ 0* 0+ end"
    hooks.remove()


def test_compiled_autograd_is_refused() -> None:
    model = nn.Sequential(linear(), linear())
    _, hooks = hooked(model)
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(UnsupportedModel, match="0: its backward would be compiled"),
    ):
        model(torch.ones(1, 3))
    hooks.remove()
