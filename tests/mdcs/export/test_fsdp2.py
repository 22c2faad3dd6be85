"""FSDP2 trains as DDP does, on real ranks; a plan of another model is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mdcs.export.document import document
from mdcs.export.fsdp2 import apply_plan
from tests.mdcs.export.training import as_ddp, by_the_loader, recomputed, statistics_with_and_without
from tests.mdcs.profiles import chain, planned
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "strategy", "scheduler"),
    [
        ("gpt2", "random", "priority"), slow("resnet", "random", "fusion"),
        slow("gpt2", "dp", "wfbp"), slow("tied", "random", "random"), slow("bert", "fsdp", "priority"),
        slow("twice", "fsdp", "dear"),
        slow("frozen", "random", "priority"), slow("checkpointed", "fsdp", "priority"),
    ],
)  # fmt: skip
def test_losses_and_norms_are_those_of_ddp(two: Ranks, model: str, strategy: str, scheduler: str) -> None:
    for rank in two.run(as_ddp, model, How(strategy, scheduler, seed=7, bytes=4000)):
        for got, expected in zip(rank["fsdp2"], rank["ddp"], strict=True):
            assert got == pytest.approx(expected, rel=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"), [("gpt2", "random"), ("tied", "random"), ("bert", "hsdp"), ("gpt2", "hsdp_no_reshard")]
)
def test_shards_within_nodes_train_as_ddp_does(nodes: Ranks, model: str, strategy: str) -> None:
    """Two nodes of two ranks; random mixes have units on all three kinds of meshes."""
    for rank in nodes.run(as_ddp, model, How(strategy, "priority", seed=28, bytes=4000, per_node=2)):
        assert rank["meshes"] >= ({(4,), (2, 2), (4, 1)} if strategy == "random" else {(2, 2)})
        for got, expected in zip(rank["fsdp2"], rank["ddp"], strict=True):
            assert got == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize(
    ("model", "strategy", "choice"),
    [
        ("gpt2", "random", "random"), ("llama", "fsdp", "full"), slow("bert", "sdp", "selective"), slow("tied", "random", "full"),
        slow("twice", "fsdp", "selective"),
    ],
)  # fmt: skip
def test_recomputation_is_that_of_ddp_with_checkpoint_in_the_same_modules(two: Ranks, model, strategy, choice) -> None:
    """Losses are equal bit for bit: gradients of two ranks are summed, and not clipped."""
    for rank in two.run(recomputed, model, How(strategy, "priority", seed=3, bytes=4000, recompute=choice)):
        assert rank["fsdp2"] == rank["ddp"] and rank["choices"] >= ({choice} if choice != "random" else set())
        assert rank["calls"] and rank["calls"] <= ({2.0, 4.0} if model == "twice" else {2.0}) and rank["names"]


def test_running_statistics_are_updated_once_a_step(two: Ranks) -> None:
    for rank in two.run(statistics_with_and_without, "resnet"):
        assert rank["again"] and rank["differing"] == []


@pytest.mark.parametrize("recompute", ["", "random"])
def test_the_loader_of_the_docs_needs_torch_alone(two: Ranks, recompute: str) -> None:
    for rank in two.run(by_the_loader, "gpt2", How("random", "random", seed=7, bytes=4000, recompute=recompute)):
        assert rank["loader"] == rank["fsdp2"]


# ---- another model


class Model(nn.Module):
    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def refused(model: nn.Module, **mesh: Any) -> str:
    file = document(planned(chain(8, 8), "fsdp"))
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as error:
        apply_plan(model, file, **mesh)
    assert all(p is before[name] for name, p in model.named_parameters())
    return str(error.value)


def test_a_plan_of_another_model_is_refused_by_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        mesh = torch.arange(2)

        def size(self) -> int:
            return 2

    a, b = nn.Linear(3, 2, bias=False), nn.Linear(4, 2, bias=False)
    assert refused(Model(a=a), mesh=Mesh()) == "unit b: the model (Model) has no module 'b': the plan is of another one"
    assert refused(Model(a=a, b=nn.Linear(4, 2)), mesh=Mesh()) == "unit b: has 8 elements in the plan and 10 in the model"
    more = Model(a=a, b=b, c=nn.Linear(1, 1))
    assert refused(more, mesh=Mesh()) == "the whole model: has 0 elements in the plan and 2 in the model"
    Mesh.mesh = torch.arange(3)
    Mesh.size = lambda self: 3
    assert refused(Model(a=a, b=b), mesh=Mesh()) == "the plan is for 2 ranks, the mesh has (3,)"


def test_a_file_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="the file has schema 2, this mdcs reads 3: export the plan again"):
        apply_plan(nn.Linear(3, 2), {"schema": 2})
