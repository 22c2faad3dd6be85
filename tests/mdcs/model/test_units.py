"""Units of a live model: wrap policies, tied and frozen parameters, and what is refused by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from mdcs.model.optimizers import Optimizers, Updates, by_optimizer
from mdcs.model.units import ByClass, ByLeaf, BySize, ModelUnit, UnsupportedModel, WrapPolicy, partition


class Block(nn.Module):
    """84 parameters: 40, 36 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.LayerNorm(4)


class Model(nn.Module):
    """Two blocks, a head of 10 parameters and one parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))


class Language(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(10, 4), Block(), nn.Linear(4, 10, bias=True)
        if tie:
            self.head.weight = self.embedding.weight


def named(units: list[ModelUnit]) -> dict[str, str]:
    """Unit → its parameters, what they have in common left out."""
    return {u.name: " ".join(n for n, _ in u.parameters) for u in units}


def sizes(units: list[ModelUnit]) -> dict[str, int]:
    return {u.name: u.numel for u in units}


# ---- policies


def test_by_leaf_every_module_that_owns_parameters_is_a_unit() -> None:
    assert sizes(partition(Model(), ByLeaf())) == {
        "model": 4,
        "blocks.0.up": 40, "blocks.0.down": 36, "blocks.0.norm": 8,
        "blocks.1.up": 40, "blocks.1.down": 36, "blocks.1.norm": 8,
        "head": 10,
    }  # fmt: skip


def test_by_class_blocks_are_units_and_the_rest_is_by_leaf() -> None:
    units = partition(Model(), ByClass(("Block",)))
    assert sizes(units) == {"model": 4, "blocks.0": 84, "blocks.1": 84, "head": 10}
    assert named(units)["blocks.1"].split()[::3] == ["blocks.1.up.weight", "blocks.1.down.bias"]


def test_where_units_nest_the_innermost_owns() -> None:
    units = partition(Model(), ByClass(("Block", "LayerNorm")))
    assert sizes(units) == {"model": 4, "blocks.0": 76, "blocks.0.norm": 8, "blocks.1": 76, "blocks.1.norm": 8, "head": 10}


def test_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no module of class Layer or Decoder in Model, which has Block, .*: name one"):
        partition(Model(), ByClass(("Layer", "Decoder")))


@pytest.mark.parametrize(
    ("min_params", "expected"),
    [
        (84, {"blocks.0": 84, "blocks.1": 84}),
        (85, {"model": 182}),  # no block is large enough, both together are
        (37, {"blocks.0.up": 40, "blocks.0": 44, "blocks.1.up": 40, "blocks.1": 44}),  # what is left of a block, too
        (36, {"blocks.0.up": 40, "blocks.0.down": 36, "blocks.1.up": 40, "blocks.1.down": 36}),
        (10**6, {}),
    ],
)
def test_by_size_the_smallest_modules_that_are_large_enough_are_units(min_params: int, expected: dict[str, int]) -> None:
    policy = BySize(min_params)
    units = sizes(partition(Model(), policy))
    assert expected.items() <= units.items()
    assert {name or "model" for name in policy.roots(Model())} == expected.keys()
    assert sum(units.values()) == 182


def test_by_size_leaves_the_model_as_it_is() -> None:
    model = Model()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    BySize(36).roots(model)
    assert dict(model.named_modules()) == modules
    assert all(p is parameters[n] for n, p in model.named_parameters())


def test_a_module_that_is_in_two_places_is_wrapped_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = Block()
            self.first, self.second = nn.Sequential(block), nn.Sequential(block)

    assert BySize(84).roots(Twice()) >= {"first.0"}
    assert sizes(partition(Twice(), BySize(36))) == {"first.0.up": 40, "first.0.down": 36, "first.0.norm": 8}
    assert sizes(partition(Twice(), ByClass(("Block",)))) == {"first.0": 84}


# ---- tied, shared, frozen


def test_tied_parameters_are_one_unit_of_both_modules() -> None:
    model = Language()
    units = {u.name: u for u in partition(model, ByClass(("Block",)))}
    assert sizes(list(units.values())) == {"embedding+head": 40, "block": 84, "head": 10}
    assert units["embedding+head"].modules == (model.embedding, model.head)
    assert named([units["embedding+head"]]) == {"embedding+head": "embedding.weight"}
    assert named([units["head"]]) == {"head": "head.bias"}  # what is not tied stays


def test_parameters_tied_inside_one_block_are_a_unit_of_their_own() -> None:
    model = Model()
    model.blocks[0].norm.weight = model.blocks[1].norm.weight  # type: ignore[assignment]
    units = partition(model, ByClass(("Block",)))
    assert sizes(units) == {"model": 4, "blocks.0": 80, "blocks.0.norm+blocks.1.norm": 4, "blocks.1": 80, "head": 10}


def test_one_module_under_two_names_is_not_tied() -> None:
    block = Block()
    model = nn.Sequential(block, nn.Linear(4, 4), block)
    units = partition(model, ByClass(("Block",)))
    assert sizes(units) == {"0": 84, "1": 20}
    assert units[0].modules == (block,)


def test_frozen_parameters_are_split_off() -> None:
    model = Model()
    for p in (model.blocks[0].up.weight, model.blocks[0].up.bias):
        p.requires_grad_(False)
    model.head.requires_grad_(False)
    units = {u.name: u for u in partition(model, ByClass(("Block",)))}
    assert {n: (u.numel, u.trainable) for n, u in units.items()} == {
        "model": (4, True),
        "blocks.0": (44, True),
        "blocks.0[frozen]": (40, False),
        "blocks.1": (84, True),
        "head": (10, False),  # all of it: no need to say so
    }
    assert units["blocks.0"].modules == units["blocks.0[frozen]"].modules == (model.blocks[0],)


def test_each_type_is_a_unit_and_the_largest_has_the_name() -> None:
    model = Model()
    block = model.blocks[0]
    block.up.to(torch.bfloat16)
    block.down.to(torch.float16)
    block.down.bias.requires_grad_(False)
    units = {u.name: u for u in partition(model, ByClass(("Block",)))}
    assert {n: (u.numel, u.parameters[0][1].dtype, u.trainable) for n, u in units.items() if u.modules == (block,)} == {
        "blocks.0": (40, torch.bfloat16, True),
        "blocks.0[float16]": (32, torch.float16, True),
        "blocks.0[float32]": (8, torch.float32, True),
        "blocks.0[float16, frozen]": (4, torch.float16, False),
    }


def test_each_optimizer_has_units_of_its_own() -> None:
    model = Model()
    biases = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    model.head.requires_grad_(False)
    updates = Updates(Optimizers([torch.optim.SGD(matrices), torch.optim.Adam(biases)]))
    units = by_optimizer(partition(model, ByClass(("Block",))), updates)
    assert sizes(units) == {"model": 4, "blocks.0": 64, "blocks.0[Adam]": 20, "blocks.1": 64, "blocks.1[Adam]": 20, "head": 10}
    assert by_optimizer(units, updates) == units


@pytest.mark.parametrize("policy", [ByLeaf(), ByClass(("Block",)), BySize(30), BySize(84), BySize(1)])
@pytest.mark.parametrize("make", [Model, Language])
def test_every_parameter_is_in_exactly_one_unit(make: Any, policy: WrapPolicy) -> None:
    model = make()
    held = Counter(p for u in partition(model, policy) for _, p in u.parameters)
    assert held == Counter(model.parameters())


class Listed(nn.Module):
    """Parameters that no forward of their own module uses."""

    def __init__(self, one: Tensor) -> None:
        super().__init__()
        self.lists = nn.ModuleList([nn.ParameterList([one])])
        self.block = nn.Sequential(nn.Linear(2, 2))
        self.block.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})


def test_parameters_in_lists_belong_to_the_module_that_has_the_list() -> None:
    assert sizes(partition(Listed(nn.Parameter(torch.ones(3))), ByLeaf())) == {"model": 3, "block": 2, "block.0": 6}
    assert sizes(partition(Listed(nn.Parameter(torch.ones(3))), ByClass(("Sequential",)))) == {"model": 3, "block": 8}


class Marked(nn.Module):
    """Has parameters without elements, one of a type that nothing else has, as some models have to tell their device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dummy, self.count = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(0, dtype=torch.bfloat16))


def test_parameters_without_elements_are_in_no_unit() -> None:
    units = partition(nn.Sequential(Marked(), nn.Linear(2, 0, bias=False)), ByClass(("Marked",)))
    assert named(units) == {"0": "0.linear.weight 0.linear.bias"}


# ---- memory under two names


def halves() -> tuple[nn.Module, nn.Module, Tensor]:
    return nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False), torch.arange(24.0)


def of_one_tensor() -> nn.Module:
    """Two parameters that lie in one tensor, one after the other, as an LSTM's do on CUDA."""
    a, b, flat = halves()
    a.weight, b.weight = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[12:].view(3, 4))
    return nn.Sequential(a, b)


def side_by_side() -> nn.Module:
    """Two parameters that are the left and the right half of one matrix."""
    a, b, flat = halves()
    a.weight, b.weight = (nn.Parameter(half) for half in flat.view(3, 8).chunk(2, dim=1))
    return nn.Sequential(a, b)


def tied_to(change: Any) -> Any:
    def make() -> nn.Module:
        model = Language(tie=False)
        change(model)
        return model

    return make


def lapping() -> nn.Module:
    a, b, flat = halves()
    a.weight, b.weight = nn.Parameter(flat[:12].view(3, 4)), nn.Parameter(flat[11:23].view(3, 4))
    return nn.Sequential(a, b)


def test_parameters_that_only_lie_in_one_tensor_are_two() -> None:
    for make in (of_one_tensor, side_by_side):
        assert sizes(partition(make(), ByLeaf())) == {"0": 12, "1": 12}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            tied_to(lambda m: setattr(m.head, "weight", nn.Parameter(m.embedding.weight))),
            r"head.weight: is another parameter than embedding.weight and shares its memory, .* "
            r"model.head.weight = model.embedding.weight",
        ),
        (
            tied_to(lambda m: setattr(m.head.weight, "data", m.embedding.weight.data)),
            r"head.weight: is another parameter .*: model.head.weight = model.embedding.weight",
        ),
        (lapping, "1.weight: is another parameter than 0.weight and shares a part of its memory, .* slice it in forward"),
        (
            tied_to(lambda m: setattr(m.head, "weight", nn.Parameter(torch.ones(1, 4).expand(10, 4)))),
            "head.weight: several of its elements are the same memory",
        ),
        (
            tied_to(lambda m: m.head.register_buffer("table", m.embedding.weight.detach()[2:])),
            "buffer head.table: shares memory with the parameter embedding.weight",
        ),
    ],
)
def test_memory_under_two_names_is_refused_by_name(make: Any, message: str, device: str) -> None:
    with torch.device(device):
        model = make()
    with pytest.raises(UnsupportedModel, match=message):
        partition(model, ByLeaf())


def test_the_line_that_the_refusal_says_works() -> None:
    model = Language(tie=False)
    model.head.weight = nn.Parameter(model.embedding.weight)
    with pytest.raises(UnsupportedModel) as refused:
        partition(model, ByLeaf())
    exec(str(refused.value).rpartition(": ")[2], {"model": model})
    assert model.head.weight is model.embedding.weight
    assert sizes(partition(model, ByLeaf()))["embedding+head"] == 40


# ---- refused


def holding(*tables: Tensor) -> nn.Module:
    """A module with these as its parameters; those of whole numbers are frozen."""
    module = nn.Module()
    for name, table in zip(("table", "other"), tables, strict=False):
        module.register_parameter(name, nn.Parameter(table, table.is_floating_point()))
    return module


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: holding(torch.ones(2), torch.ones(2, device="meta")), r"unit model is on several devices, \['cpu', 'meta'\]"),
        (lambda: holding(torch.ones(2, dtype=torch.int64)), "table: torch.int64 parameters are not supported: register_buffer"),
        (lambda: holding(torch.eye(2).to_sparse()), r"table: torch.sparse_coo parameters are not supported: make it dense"),
        (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0.weight: sparse gradients .*: make .* with sparse=False"),
        (lambda: nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True)), "0.weight: sparse gradients are not supported"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "0.weight: is not initialised yet"),
        (
            lambda: holding(TwoTensor(torch.ones(2), torch.ones(2))),
            r"table: is already sharded .* or quantized \(.*\): remove fully_shard\(\)",
        ),
        (lambda: nn.Linear(0, 2, bias=False), "the model has no trainable parameter"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "the model has no trainable parameter"),
        (lambda: nn.ReLU(), "the model has no trainable parameter"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        partition(make(), ByLeaf())
