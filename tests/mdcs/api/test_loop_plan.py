"""A model that does not fit whole is sharded from its first step on, which is measured; every step is DDP's."""

from __future__ import annotations

import contextlib
import gc
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.api import loop_plan, session
from mdcs.model.optimizers import Optimizers
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.profiler.measurement import whole_bytes
from mdcs.runtime.engine import Engine
from mdcs.telemetry import memory_meter
from mdcs.telemetry.memory_meter import ShimMeter
from mdcs.torch_compat import innermost_dispatch_mode
from tests.mdcs.api.test_session import OPTIMIZERS, Autoencoder, Block, Skipping, choosing, differences, methods, passes, texts
from tests.mdcs.measured import plans_are_made_at_once

STEPS = 36


class Shuffled(nn.Module):
    """Blocks that run in another order than they are registered in, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(16, 5), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in (2, 0, 1, 0):
            x = self.blocks[number](x)
        return self.last(x)


class Queried(nn.Module):
    """A unit returns views of its weight, which others use after it has been freed, in forward and in backward."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, n: int) -> Tensor:
            return self.weight[:n]

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.first, self.block, self.last = self.Queries(), nn.Linear(8, 16), Block(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries(6)
        hidden = self.block(self.first(x))
        return self.last(hidden * queries + queries)


class Tied(nn.Module):
    """The head is the first layer's weight, used at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 16), nn.Sequential(Block(16), Block(16))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.blocks(self.first(x)), self.first.weight.t())[:, :5]


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(4)), nn.Linear(16, 5))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": blocks, "shuffled": Shuffled, "skipping": Skipping, "queried": Queried, "tied": Tied, "methods": Autoencoder,
}  # fmt: skip


def train(
    name: str, ours: bool, *, optimizer: str = "adam", micro_steps: int = 1, clip_norm: float | None = None, meta: bool = False,
    budget: float | None = 0.8, recompute: str = "auto",
) -> Any:  # fmt: skip
    """The same lines for both. ``budget``: in parts of what the model takes whole."""
    torch.manual_seed(0)
    with torch.device("meta" if meta and ours else "cpu"):
        model: Any = MODELS[name]()
    made = OPTIMIZERS[optimizer](model.parameters())
    parallel: Any = None
    if ours:
        if meta:
            torch.manual_seed(0)
        units = mdcs.partition(model)
        limit = None if budget is None else int(budget * whole_bytes(units, Optimizers(made)))
        parallel = mdcs.parallelize(
            model, made, budget=limit, clip_norm=clip_norm, seconds=0.5, progress=False, timeout_s=30, micro_steps=micro_steps,
            recompute=recompute,
        )
        first = parallel.plan
    else:
        model = nn.parallel.DistributedDataParallel(
            model, process_group=dist.new_group(), find_unused_parameters=name == "skipping", broadcast_buffers=False
        )
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    torch.manual_seed(100 + dist.get_rank())
    loss_of = methods if name == "methods" else texts
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.8**step)
    losses: list[float] = []
    for step in range(STEPS):
        if name == "skipping":
            inner.left_out = (step % 3,) if dist.get_rank() else ()
        losses += passes(model, loss_of, step, micro_steps, None if ours else clip_norm)
        with plans_are_made_at_once():
            made.step()
        schedule.step()
        made.zero_grad()
    numbers = torch.rand(3).tolist()
    if not ours:
        return losses, {k: v.clone() for k, v in model.module.state_dict().items()}, numbers, made.state_dict(), None
    state, saved, plan = parallel.state_dict(), made.state_dict(), parallel.plan
    assert parallel.steps == STEPS and [r.step for r in parallel.records(flush=True)] == list(range(1, STEPS + 1))
    assert all(k.sharded == (budget is not None or meta) for k in first.strategies) and first is not plan
    assert plan.micro_steps == micro_steps
    parallel.close()
    assert all(torch.equal(v, state[name]) for name, v in model.state_dict().items())
    return losses, state, numbers, saved, plan


def differing(name: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Differences from DDP's values, and the names of the units that the plan knows to be used elsewhere."""
    warnings.simplefilter("ignore")
    plain = {k: v for k, v in options.items() if k not in ("budget", "meta", "recompute")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_meter, "unmeasured", lambda device: "smaller than what earlier tests have left here")
        wanted, found = train(name, False, **plain), train(name, True, **options)
    return differences(wanted, found), [unit.name for unit in found[4].profile.units if unit.aliased]


@pytest.mark.parametrize(
    ("name", "options", "aliased"),
    [
        ("blocks", {}, []),
        ("blocks", {"micro_steps": 2, "budget": 0.95}, []),
        ("blocks", {"optimizer": "sgd", "clip_norm": 1e6}, []),
        ("blocks", {"meta": True, "budget": None, "recompute": "planned"}, []),
        ("shuffled", {}, []),
        ("skipping", {}, []),
        ("queried", {}, ["queries"]),
        pytest.param("tied", {"budget": 0.9}, ["first"], marks=pytest.mark.slow),
        pytest.param("methods", {"budget": 0.9}, [], marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_whole_trains_as_with_ddp(two, name, options, aliased):
    for rank, (out, used) in enumerate(two.run(differing, name, options, timeout_s=100.0)):
        assert (out, used) == ([], aliased), rank


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(12)), nn.Linear(256, 16))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def measured_bytes(share: float) -> dict[str, Any]:
    """Peaks of the run that is measured, of the change of plans, and of the plan's first step; and the budget."""
    warnings.simplefilter("ignore")
    gc.collect()  # what an earlier test has left in this process would count as activations
    model = Wide()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    whole = whole_bytes(mdcs.partition(model), Optimizers(optimizer))
    peaks: list[int] = []
    said = io.StringIO()

    def restarted(self: ShimMeter) -> None:
        peaks.append(self.peaks()["total"])
        self._reset_peaks()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShimMeter, "reset", restarted)
        with contextlib.redirect_stderr(said):
            parallel = mdcs.parallelize(model, optimizer, budget=int(share * whole), seconds=0.5, timeout_s=30)
        with parallel:
            peaks.clear()
            for step in range(4):
                # No variable keeps the batch while the next one is made: two at a time are not in the profile.
                model(torch.rand(32, 256, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                parallel.step()
            plan = parallel.plan
            parallel.drain()
            last = parallel.memory()["measured"]["total"]
    return {
        "measuring": max(peaks), "after": last, "budget": int(share * whole), "whole": whole, "said": said.getvalue(),
        "activations": max(slot.peak for slot in plan.profile.slots), "seconds": min(slot.seconds for slot in plan.profile.slots),
    }  # fmt: skip


@pytest.mark.parametrize("share", [0.48, 0.6, pytest.param(0.8, marks=pytest.mark.slow)])
def test_it_takes_fewer_bytes_than_the_budget_while_it_is_measured_and_handed_over(two, share):
    for rank, found in enumerate(two.run(measured_bytes, share, timeout_s=100.0)):
        assert found["activations"] > 0 and found["seconds"] > 0
        assert found["measuring"] <= found["budget"] and found["after"] <= found["budget"] < found["whole"], found
        assert "state take 12.4 MiB of a budget of " in found["said"] and "MiB: sharded from the start" in found["said"] or rank


def refused(budget: int) -> tuple[str, int | None, str]:
    model = blocks()
    with pytest.raises(InfeasibleBudget) as error:
        mdcs.parallelize(model, torch.optim.Adam(model.parameters()), budget=budget, progress=False, timeout_s=30)
    with contextlib.redirect_stderr(io.StringIO()) as uncaught:
        sys.excepthook(InfeasibleBudget, error.value, None)
    return str(error.value), error.value.smallest, uncaught.getvalue()


def test_a_budget_that_no_plan_can_keep_is_refused_on_every_rank(two):
    """Each rank has a half of 22 kB of parameters and 45 of state, and the largest unit whole."""
    for rank, (said, smallest, uncaught) in enumerate(two.run(refused, 20_000)):
        assert uncaught == ("" if rank else f"mdcs: {said}\n")
        assert said.startswith("the model (parameters and optimizer state alone) does not fit 19.6 KiB; every plan needs more")
        assert smallest is not None and smallest > 30_000


def test_what_is_chosen_is_said():
    model = blocks()
    optimizers, units = Optimizers(torch.optim.Adam(model.parameters())), mdcs.partition(model)
    assert loop_plan.must_shard(units, optimizers, None) == (False, "")
    sharded, said = loop_plan.must_shard(units, optimizers, 1 << 30)
    assert not sharded and said.endswith("MiB of a budget of 1024.0 MiB: whole in the first steps")
    with torch.device("meta"):
        model = blocks()
    sharded, said = loop_plan.must_shard(mdcs.partition(model), Optimizers(torch.optim.Adam(model.parameters())), None)
    assert sharded and said == "the model is on the meta device: it is sharded from the start"


def overlapping() -> tuple[list[str], int]:
    """Differences to DDP where passes need not be counted; the messages that were sent before the first step()."""
    sent: list[int] = []
    real = mdcs.Session.step

    def counting(self: mdcs.Session) -> None:
        sent.append(self._engine.wire.queue.issued)
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mdcs.Session, "step", counting)
        wanted, found = train("blocks", False, micro_steps=2), train("blocks", True, micro_steps=2, budget=None)
    names = [key for key, value in wanted[1].items() if not torch.equal(value, found[1][key])]
    return names + ["losses"] * (wanted[0] != found[0]), sent[0]


def test_messages_overlap_from_the_first_step_where_its_passes_are_known(two):
    for differs, sent in two.run(overlapping, timeout_s=100.0):
        assert differs == [] and sent >= 6  # as many as units


def test_nothing_is_left_of_a_run_that_ends_before_its_plan():
    with torch.device("meta"):
        model = blocks()
    with mdcs.parallelize(model, torch.optim.Adam(model.parameters()), progress=False) as parallel:
        texts(model, 0)
        assert innermost_dispatch_mode() is not None
        parallel.abandon()
        with pytest.raises(mdcs.RunError, match="cannot be used here"):
            model[0].weight.norm()  # type: ignore[operator]
    assert innermost_dispatch_mode() is None and not model[0]._forward_hooks


def left_after_forward() -> list[str]:
    """Parameters without a gradient or an update in a step of the plain loop that goes on after a first step was left."""
    torch.manual_seed(0)
    model = blocks()
    before, optimizer = {k: v.clone() for k, v in model.state_dict().items()}, torch.optim.Adam(model.parameters())
    limit = int(0.8 * whole_bytes(mdcs.partition(model), Optimizers(optimizer)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mdcs.parallelize(model, optimizer, budget=limit, progress=False, timeout_s=30):
            texts(model, 0)
    texts(model, 0).backward()
    optimizer.step()
    grads = {name for name, p in model.named_parameters() if p.grad is None}
    return [name for name, v in model.state_dict().items() if name in grads or torch.equal(v, before[name])]


def test_a_model_is_whole_again_after_a_loop_that_ends_after_a_forward_pass(two):
    assert two.run(left_after_forward) == [[], []]


def without_a_next_engine() -> str:
    with torch.device("meta"):
        model = blocks()
    optimizer = torch.optim.Adam(model.parameters())

    def full(*arguments: Any) -> Engine:
        """Fail as a device without memory does, in the place of the engine of the plan that was measured for."""
        if isinstance(arguments[-1], Engine):
            raise RuntimeError("out of memory")
        return Engine(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of memory"):
        patch.setattr(session, "Engine", full)
        with mdcs.parallelize(model, optimizer, progress=False, timeout_s=30) as parallel:
            choosing(parallel, lambda step: texts(model, step))
    with pytest.raises(mdcs.RunError) as error:
        model[0].weight.norm()  # type: ignore[operator]
    parallel.close()
    return str(error.value)


def test_parameters_of_a_run_whose_next_one_could_not_be_made_are_not_read(two):
    assert all("planning anew failed" in said for said in two.run(without_a_next_engine))


class Keeping(nn.Module):
    """Returns a view of a weight beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(self.first(x)), self.first.weight[:2]


def keeping() -> str:
    with torch.device("meta"):
        model = Keeping()
    optimizer = torch.optim.Adam(model.parameters())
    with mdcs.parallelize(model, optimizer, progress=False, timeout_s=30):
        out, kept = model(torch.ones(2, 8))
        (out.sum() + kept.sum()).backward()
        with pytest.raises(mdcs.UnsupportedModel) as error:
            optimizer.step()
        del kept
    return str(error.value)


def test_a_view_that_is_kept_after_the_step_is_refused_before_its_memory_is_used(two):
    for said in two.run(keeping):
        assert said == (
            "first: a tensor that shares the memory of its parameters is kept after the step, when they are in pieces: keep a "
            "copy (.clone())"
        )


def closed_in_pieces(meta: bool) -> tuple[list[str], str]:
    """The warnings of leaving a run whose budget has no room for the whole model, and what a use says afterwards."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = blocks()
    optimizer = torch.optim.Adam(model.parameters())
    # all zero2 takes 5/8, so some unit is sharded in any plan
    limit = int(0.6 * whole_bytes(mdcs.partition(model), Optimizers(optimizer)))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(memory_meter, "unmeasured", lambda device: "smaller than what earlier tests have left here")
        with mdcs.parallelize(model, optimizer, budget=limit, progress=False, timeout_s=30, seconds=0.5, trials=1) as parallel:
            choosing(parallel, lambda step: texts(model, step))
            saved = parallel.state_dict(rank0_only=True, cpu=True)
            sharded = [s for s in parallel._engine.storages if s.strategy.sharded]
    with pytest.raises(mdcs.RunError) as error:
        sharded[0].parameters[0].norm()
    plain = blocks()
    if saved:
        plain.load_state_dict(saved)
    said = [str(w.message) for w in caught if "closed" in str(w.message)]
    return said, str(error.value)


@pytest.mark.parametrize("meta", [False, True])
def test_a_run_whose_budget_has_no_room_for_the_whole_model_ends_in_pieces(two, meta):
    first, other = two.run(closed_in_pieces, meta)
    assert len(first[0]) == 1 and "parallel.checkpoint" in first[0][0] and other[0] == []
    for _, error in (first, other):
        assert "is in pieces" in error and "MiB of a budget of" in error
