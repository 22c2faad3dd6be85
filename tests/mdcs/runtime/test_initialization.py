"""Models that are on the meta device when a run begins: what they start with, what that takes, and what is refused."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.model.guard import leave_meta
from mdcs.plan.lifetimes import at_rest, unit_rows
from mdcs.plan.period import Strategy, choices
from mdcs.planner.schedulers import StrategyAssignment, Wfbp
from mdcs.profiler.consensus import on_rank_zero
from mdcs.runtime.initialization import InitFunction, Initializer
from mdcs.telemetry.memory_meter import ShimMeter
from tests.mdcs.runtime.ranks import OnTwo, Ranks
from tests.mdcs.runtime.test_loops import said
from tests.mdcs.runtime.training import TINY, Twin, differing, measured, optimizer_for

on_two = OnTwo()
STEPS = 4
WIDTH = 64
HOWS = ("dp", "zero2", "sdp", "fsdp", "mixed")  # strategies


class Scale(nn.Module):
    """Divides by a buffer that no checkpoint has, and that only it knows how to fill."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.by.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.by


class Words(nn.Module):
    """An embedding; torch's own takes seconds to be made on the meta device, once in a process."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Model(nn.Module):
    """Tied and frozen weights, a unit inside another, statistics and a buffer of its own."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.words = Words(11, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3)))
        self.scale = Scale(width)
        self.head = nn.Linear(width, 11)
        self.head.weight = self.words.weight
        frozen: Any = self.blocks[1]
        frozen[0].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits: Tensor = self.head(self.scale(hidden))
        return logits


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 11, (8,), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens), tokens)


def meta(half: bool = False) -> tuple[nn.Module, list[mdcs.ModelUnit]]:
    with torch.device("meta"):
        model = Model()
    if half:
        model.bfloat16()
    return model, mdcs.partition(model, mdcs.ByClass(("Sequential",)))


def materialize(model: nn.Module, units: list[mdcs.ModelUnit], init: InitFunction | None = None) -> None:
    """Give a model memory, and the values that a run would give it."""
    initialisation = Initializer(model, units, init, torch.device("cpu"))
    for members in initialisation.together:
        for p in (p for u in members for _, p in units[u].parameters if p.is_meta):
            leave_meta(p, torch.full(p.shape, torch.nan, dtype=p.dtype, device="cpu"))
        initialisation.units(members)
    initialisation.the_rest()


def planned(strategy: str, half: bool = False, rank: int = 0, optimizer: str = "adam") -> tuple[nn.Module, mdcs.Plan]:
    """A plan for the model, profiled on a twin that is whole: the twin, before any step, too."""
    model, units = meta(half)
    torch.manual_seed(0)
    materialize(model, units)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    profile = measured(
        model, units, lambda: loss(model, 0, rank), optimizer_for(optimizer, model), master_dtype=torch.float32 if half else None
    )
    model.load_state_dict(kept)
    names = choices(profile)
    mix = [names[u % 4] if strategy == "mixed" else Strategy(strategy) for u in range(len(units))]
    return model, on_rank_zero(lambda: as_ready(profile, mix))


def as_ready(profile: mdcs.Profile, strategies: list[Strategy]) -> mdcs.Plan:
    return Wfbp().schedule(StrategyAssignment(mdcs.Job(profile), tuple(strategies)))


@on_two(*HOWS)
def a_model_from_the_meta_device_trains_like_one_that_was_whole(strategy: str) -> list[Any]:
    rank = dist.get_rank()
    plain, plan = planned(strategy, rank=rank)
    model, units = meta()
    optimizer = optimizer_for("adam", model)  # of parameters that have no memory yet
    torch.manual_seed(100 * rank)  # rank 0 draws what the plain model was made of, the other something else
    with mdcs.parallelize(model, optimizer, plan, units, timeout_s=20) as parallel:
        losses = []
        for step in range(STEPS):
            value = loss(model, step, rank)
            value.backward()
            parallel.step()
            losses.append(value.item())
        state = parallel.state_dict()
    twin = Twin(plain, optimizer_for("adam", plain))
    wanted = [value for step in range(STEPS) for value in twin.step(lambda model, step=step: loss(model, step, rank))]
    names = [name for name, _ in plain.named_parameters()]
    final = {name: value for name, value in plain.state_dict().items() if name in names}
    assert model.get_parameter("head.weight") is model.get_parameter("words.weight")
    return [losses] * (losses != wanted) + differing({n: state[n] for n in names}, final)


def settle(meter: ShimMeter) -> None:
    """Wait while memory changes: the backend's threads let go of a message when they come to it."""
    unchanged = 0
    for _ in range(100):
        before = meter.live()
        time.sleep(0.1)
        unchanged = unchanged + 1 if meter.live() == before else 0
        if unchanged == 3:
            return


def start_bytes(plan: mdcs.Plan, together: list[list[int]]) -> int:
    """The peak of parameters and masters: what is at rest of earlier units, and whole those that are made together."""
    held = most = 0
    profile = plan.profile
    for members in together:
        held += sum(profile.layouts[u].param_bytes for u in members)
        for u in members:
            strategy, layout = plan.strategies[u], profile.layouts[u]
            held -= 0 if strategy.sharded else layout.param_bytes
            held += at_rest(unit_rows(plan.period, u, strategy))["parameters"]
            held += layout.elements // strategy.parts(profile) * layout.master_width
            most = max(most, held)
            held -= layout.param_bytes if strategy.sharded else 0
    return most


def bytes_of_start(strategy: str, half: bool) -> tuple[int, int, int, int]:
    """Most bytes that the allocator gave from the call of parallelize to its return, what was predicted, buffers, and the whole
    model.
    """
    _, plan = planned(strategy, half, dist.get_rank(), "plain sgd")  # state would hide what is whole at first
    model, units = meta(half)
    together = Initializer(model, units, None, torch.device("cpu")).together
    optimizer, meter = optimizer_for("plain sgd", model), ShimMeter()
    gc.collect()  # of the twin
    settle(meter)
    meter.window()
    before = meter.live()["total"]
    parallel = mdcs.parallelize(model, optimizer, plan, units, timeout_s=20)
    most = meter.window()["total"]
    parallel.close(whole=False)
    assert before is not None and most is not None
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    whole = sum(layout.param_bytes for layout in plan.profile.layouts)
    return most - before, start_bytes(plan, together), buffers, whole


@pytest.mark.parametrize(("strategy", "half"), [*((s, False) for s in HOWS), ("zero2", True), ("fsdp", True)])
def test_no_more_than_a_unit_is_whole_beside_the_shards(two: Ranks, strategy: str, half: bool) -> None:
    for found, predicted, buffers, whole in two.run(bytes_of_start, strategy, half):
        assert predicted <= found <= predicted + buffers + 16  # and a number or two
        if strategy in ("sdp", "fsdp") and not half:
            assert predicted < 0.85 * whole


class Bare(nn.Module):
    def __init__(self, *size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class HalfForgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.bias)
        nn.init.ones_(self.weight[:, :2])


class Bytes(nn.Module):
    """Has bytes of the value that marks memory without values."""

    def __init__(self, sets: bool) -> None:
        super().__init__()
        self.sets = sets
        self.register_buffer("bytes", torch.empty(2, dtype=torch.uint8))

    def reset_parameters(self) -> None:
        if self.sets:
            self.bytes.fill_(0x5A)


@pytest.mark.parametrize("sets", [True, False])
def test_any_value_may_be_a_buffers(sets: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Bytes(sets))
    with nullcontext() if sets else pytest.raises(mdcs.UnsupportedModel, match="1.bytes"):
        materialize(model, mdcs.partition(model))


class Meddling(nn.Linear):
    other: Any = None  # no module of its own

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.other is not None:
            nn.init.ones_(self.other[0].weight)


def start(kind: str) -> str:
    """Error that starting such a model raises, on a rank that is alone."""
    with torch.device("meta"):
        second = {"bare": Bare, "forgetful": Forgetful, "half": HalfForgetful, "meddling": Meddling}[kind](3, 3)
        model = nn.Sequential(nn.Linear(3, 3), second)
    units = mdcs.partition(model, mdcs.ByLeaf())
    twin = nn.Sequential(nn.Linear(3, 3), Bare(3, 3) if kind == "bare" else nn.Linear(3, 3))
    whole = mdcs.partition(twin, mdcs.ByLeaf())
    profile = measured(twin, whole, lambda: twin(torch.ones(1, 3)).sum(), optimizer_for("adam", twin))
    plan = as_ready(profile, [Strategy.sdp, Strategy.dp])
    if kind == "meddling":
        second.other = [model[0]]
    return said(lambda: mdcs.parallelize(model, optimizer_for("adam", model), plan, units))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bare", "1.weight: is on the meta device, and Bare has no reset_parameters(): pass init="),
        ("forgetful", "1.bias: was on the meta device, and the initialisation of Forgetful has left it without values"),
        ("half", "1.weight: was on the meta device, and the initialisation of HalfForgetful has left it without values"),
        ("meddling", "the initialisation of a module used 0.weight (fill_), which is of another unit"),
    ],
)
def test_what_is_not_initialised_is_refused_by_name(single: Ranks, kind: str, message: str) -> None:
    assert message in single.run(start, kind)[0]


@on_two(("all", "words.weight"), ("a buffer", "table"))
def every_rank_says_that_a_model_has_no_memory(what: str, name: str) -> list[str]:
    model, units = meta()
    if what == "a buffer":
        materialize(model, units)
        model.register_buffer("table", torch.ones(2, device="meta"))
    message = said(lambda: mdcs.autoplan(model, optimizer_for("adam", model), units, lambda: loss(model, 0, 0)))
    where = "is on the meta device, where nothing can be measured: call parallelize() without a plan"
    return [message] * (message != f"UnsupportedModel: {name}: {where}")


@pytest.mark.slow
def test_init_may_be_that_of_a_library() -> None:
    """transformers' models say how a module of theirs begins; modules are given to it that have something of their own."""
    with torch.device("meta"):
        task = TINY["gpt2"].build()
    units = mdcs.partition(task.model, mdcs.ByClass(task.block_classes))
    with pytest.raises(mdcs.UnsupportedModel, match=r"c_attn\.weight: is on the meta device, and Conv1D has no reset_parameters"):
        materialize(task.model, units)
    materialize(task.model, units, init=task.model._init_weights)
    assert all(p.isfinite().all() for p in task.model.parameters())
    assert task.model.lm_head.weight is task.model.transformer.wte.weight


test_models_on_the_meta_device = on_two.as_test()
