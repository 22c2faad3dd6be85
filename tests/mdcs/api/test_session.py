"""One call for a start: the plan is made in the loop's first step, and every step is DDP's."""

from __future__ import annotations

import contextlib
import io
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs
from mdcs.api import loop_plan
from mdcs.planner.recompute import is_measured
from mdcs.planner.trials import make_plans
from mdcs.profile.schema import INPUTS
from tests.mdcs.measured import plans_are_made_at_once

STEPS = 36


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.narrow(self.wide(self.norm(x)).relu()))


class Images(nn.Module):
    """Convolutions with BatchNorm, whose outputs are a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.layers(x)
        return {"logits": self.head(hidden.mean((2, 3))) * scale, "hidden": hidden, "name": "images"}


class Autoencoder(nn.Module):
    """The loop calls its methods; DistributedDataParallel calls forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(2)))
        self.decoder = nn.Sequential(*(Block(16) for _ in range(2)), nn.Linear(16, 8))

    def encode(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.encoder(x)
        return hidden + 0.1 * torch.randn_like(hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(x)
        return hidden, self.decoder(hidden.tanh())


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), *(Block(16) for _ in range(3)), nn.Linear(16, 5))


def texts(model: Callable[..., Any], seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    return nn.functional.cross_entropy(model(torch.rand(6, 8, generator=drawn)), torch.arange(6) % 5)


def images(model: Callable[..., Any], seed: int) -> Tensor:
    drawn = torch.Generator().manual_seed(seed)
    output = model(torch.rand(6, 4, 8, 8, generator=drawn), scale=2.0)
    return nn.functional.cross_entropy(output["logits"], torch.arange(6) % 5) + 0.1 * output["hidden"].square().mean()


def pairs(model: Callable[..., Any], seed: int) -> Tensor:
    """Two calls of the model for one loss."""
    drawn = torch.Generator().manual_seed(seed)
    a, b = (model(torch.rand(6, 8, generator=drawn)) for _ in range(2))
    return (a - b).square().mean() + a.square().mean()


def methods(model: Any, seed: int) -> Tensor:
    x = torch.rand(6, 8, generator=torch.Generator().manual_seed(seed))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        hidden, out = model(x)
    else:
        hidden = model.encode(x)
        out = model.decoder(hidden.tanh())
    return (out - x).square().mean() + 0.01 * hidden.square().mean()


def cast(model: Callable[..., Any], seed: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return texts(model, seed)


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]] = {
    "blocks": (blocks, texts, "adam"),
    "images": (Images, images, "sgd"),
    "pairs": (blocks, pairs, "adamw"),
    "autocast": (blocks, cast, "adam"),
    "methods": (Autoencoder, methods, "adam"),
}
OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


def passes(model: Any, loss_of: Any, step: int, micro_steps: int, clip_norm: float | None) -> list[float]:
    """The micro-steps of a step: their losses. ``clip_norm``: of gradients that nobody else clips."""
    losses = []
    for micro in range(micro_steps):
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = micro == micro_steps - 1
        loss = loss_of(model, 1000 * step + 10 * micro + dist.get_rank()) / micro_steps
        loss.backward()
        losses.append(loss.item())
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    return losses


def loop(name: str, ours: bool, *, micro_steps: int = 1, budget: Any = None, clip_norm: float | None = None) -> Any:
    """The same lines for both: the losses, the weights, and random numbers at the end."""
    make, loss_of, optimizer_name = JOBS[name]
    torch.manual_seed(dist.get_rank() if ours else 0)  # ours begins with rank 0's weights, as DDP does
    model: Any = make()
    torch.manual_seed(100 + dist.get_rank())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    parallel: Any = None
    if ours:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel = mdcs.parallelize(
                model, optimizer, budget=budget, clip_norm=clip_norm, seconds=0.5, progress=False, timeout_s=30
            )
        optimizer = parallel.optimizer
        assert parallel.is_choosing and parallel.memory()["predicted"]
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    losses: list[float] = []
    for step in range(STEPS):
        losses += passes(model, loss_of, step, micro_steps, None if ours else clip_norm)
        with warnings.catch_warnings(), plans_are_made_at_once():
            warnings.simplefilter("ignore")
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    numbers = torch.rand(3).tolist()
    if not ours:
        return losses, {k: v.clone() for k, v in model.module.state_dict().items()}, numbers, optimizer.state_dict()
    state, saved = parallel.state_dict(), optimizer.state_dict()
    assert parallel.steps == STEPS and parallel.plan.micro_steps == micro_steps
    assert [r.step for r in parallel.records(flush=True)] == list(range(1, STEPS + 1)) and not parallel.is_choosing
    if budget is not None:
        assert parallel.plan.prediction.peak_bytes <= parallel.plan.budget
    parallel.close()
    assert all(torch.equal(v, state[name]) for name, v in model.state_dict().items())
    return losses, state, numbers, saved


def differences(wanted: Any, found: Any) -> list[str]:
    """Names of what differs: losses, random numbers, weights, and the optimizer's state."""
    out = [what for what, i in (("losses", 0), ("numbers", 2)) if wanted[i] != found[i]]
    out += [key for key, value in wanted[1].items() if "running" not in key and not torch.equal(value, found[1][key])]
    for number, own in wanted[3]["state"].items():
        theirs = found[3]["state"][number]
        out += [f"{number} {key}" for key, value in own.items() if not torch.equal(torch.as_tensor(value), theirs[key])]
    return out


def both(name: str, options: dict[str, Any]) -> list[str]:
    """Names of the values that differ from DDP's."""
    plain = {k: v for k, v in options.items() if k != "budget"}
    return differences(loop(name, False, **plain), loop(name, True, **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("blocks", {"micro_steps": 2, "budget": "90% of ddp"}),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in (
                ("blocks", {}), ("blocks", {"clip_norm": 1e6}), ("images", {}), ("pairs", {}), ("autocast", {"budget": "1 GiB"}),
                ("methods", {"micro_steps": 2}),
            )
        ),
    ],
)
def test_every_step_is_ddps_from_the_first(two, name, options):
    assert two.run(both, name, options, timeout_s=200.0) == [[], []]


def resumed(root: str) -> list[str]:
    """Two steps and a checkpoint, then a new start that resumes in its first step: what differs from four steps."""

    def started() -> tuple[nn.Module, torch.optim.Optimizer, mdcs.Session]:
        torch.manual_seed(dist.get_rank())
        model = blocks()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        return model, optimizer, mdcs.parallelize(model, optimizer, seconds=0.2, progress=False, timeout_s=30)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        losses = []
        for step in numbers:
            loss = texts(model, 1000 * step + dist.get_rank())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    warnings.simplefilter("ignore")
    model, optimizer, parallel = started()
    with parallel:
        steps(model, optimizer, range(2))
        parallel.checkpoint(root, extra={"data": 2})
        wanted = steps(model, optimizer, range(2, 4)), parallel.state_dict()
    model, optimizer, parallel = started()
    with parallel:
        found = mdcs.resume(parallel, root)
        assert found is not None and found.step == parallel.steps == 2 and found.extra == {"data": 2}
        ours = steps(model, optimizer, range(2, 4)), parallel.state_dict()
        assert parallel.steps == 4
    out = [] if ours[0] == wanted[0] else [f"losses {ours[0]} {wanted[0]}"]
    return out + [name for name, value in wanted[1].items() if not torch.equal(ours[1][name], value)]


@pytest.mark.slow
def test_a_new_start_resumes_before_its_plan_is_made(two, tmp_path):
    assert two.run(resumed, str(tmp_path), timeout_s=200.0) == [[], []]


class Skipping(nn.Module):
    """Blocks of which some are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.left_out: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x if number in self.left_out else block(x)
        return self.last(x)


def choosing(parallel: mdcs.Session, loss_of: Callable[[int], Tensor]) -> int:
    """Train until the plan is chosen; the number of steps."""
    while parallel.is_choosing:
        loss_of(parallel.steps).backward()
        parallel.step()
    return parallel.steps


def started_twice(folder: str) -> list[tuple[int, int]]:
    """By start: the steps before the chosen plan, and the number of profiles in the folder."""
    out = []
    for lr in (0.1, 0.2):
        torch.manual_seed(0)
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        run = mdcs.parallelize(model, optimizer, profiles=folder, seconds=0.5, progress=False, timeout_s=30)
        with run as parallel, plans_are_made_at_once():
            steps = choosing(parallel, lambda step, model=model: texts(model, step))
        dist.barrier()
        out.append((steps, len(list(Path(folder).iterdir()))))
    return out


def test_a_second_start_has_the_profile_of_the_first(two, tmp_path):
    for rank in two.run(started_twice, str(tmp_path), timeout_s=100.0):
        [(measured, files), second] = rank
        assert measured > second[0] > 1 and files == second[1] == 1


def steps_of_start() -> list[int]:
    """Steps before the chosen plan, where the loop waits for it, and where it does not."""
    found = []
    for wait in (plans_are_made_at_once, contextlib.nullcontext):
        torch.manual_seed(0)
        model = blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.MonkeyPatch.context() as patch, wait():
            patch.setattr(loop_plan, "make_plans", lambda *given, **options: (time.sleep(0.5), make_plans(*given, **options))[1])
            with mdcs.parallelize(model, optimizer, trials=1, profiles=False, progress=False, timeout_s=30) as parallel:
                found.append(choosing(parallel, lambda step, model=model: texts(model, step)))
    return found


def test_training_goes_on_while_plans_are_made(two):
    (waited, went_on), others = two.run(steps_of_start, timeout_s=100.0)
    assert [waited, went_on] == others and went_on > waited


class Waiting(nn.Module):
    """A layer whose forward takes as long as it is told."""

    seconds = 0.02

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(Waiting.seconds)
        return x


def watched() -> tuple[list[bool], list[float]]:
    """Whether a plan is being chosen: after the first choice, after steps as usual, and after slower ones; the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(blocks(), Waiting())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    states, losses = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop_plan, "WATCHED", 4)
        patch.setattr(loop_plan, "_DIFFERENT", 1.0)
        parallel = mdcs.parallelize(
            model, optimizer, replan="auto", trials=1, profiles=False, seconds=0.5, progress=False, timeout_s=30
        )
        for seconds in (0.02, 0.02, 0.2):
            Waiting.seconds = seconds
            choosing(parallel, lambda step: texts(model, step))
            for step in range(8 if states else 0):
                loss = texts(model, step)
                loss.backward()
                parallel.step()
                losses.append(loss.item())
                if parallel.is_choosing:
                    break
            states.append(parallel.is_choosing)
        parallel.close()
    return states, losses


def test_a_lasting_change_of_the_steps_time_starts_another_choice(two):
    (states, losses), (others, _) = two.run(watched, timeout_s=100.0)
    assert states == others == [False, False, True] and all(map(math.isfinite, losses))


TARGETS = torch.arange(1000) % 5


def deep(samples: int, seed: int) -> Tensor:
    return torch.rand(samples, 8, generator=torch.Generator().manual_seed(seed))


def recomputing(recompute: str | None, options: dict[str, Any]) -> Any:
    """Losses and weights of a loop whose activations are most of its bytes; DDP's without ``recompute``. The plan made."""
    torch.manual_seed(0)
    model: Any = blocks()
    torch.manual_seed(100 + dist.get_rank())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    parallel = None
    if recompute is None:
        model = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
    else:
        parallel = mdcs.parallelize(model, optimizer, recompute=recompute, seconds=0.2, progress=False, timeout_s=30, **options)
    losses: list[float] = []
    for step in range(STEPS):
        loss = nn.functional.cross_entropy(model(deep(1000, 10 * step + dist.get_rank())), TARGETS)
        loss.backward()
        with plans_are_made_at_once():
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if parallel is None:
        return losses, {k: v.clone() for k, v in model.module.state_dict().items()}
    state, peaks = parallel.state_dict(), [m.measured["total"] for m in parallel.memory_by_slot() if m.measured]
    plan = parallel.plan
    parallel.close()
    return losses, state, plan, max(peaks)


def as_ddp_recomputing(recompute: str, options: dict[str, Any]) -> dict[str, Any]:
    losses, state = recomputing(None, {})
    found, ours, plan, peak = recomputing(recompute, options)
    [kept] = map(Path.read_text, Path(options["profiles"]).iterdir())
    assert mdcs.Profile.from_json(kept).slots == plan.job.profile.slots != plan.profile.slots
    return {
        "differs": [name for name, value in state.items() if not torch.equal(value, ours[name])] + ["losses"] * (losses != found),
        "choices": {*plan.recompute}, "peak": peak, "budget": plan.budget, "inputs": plan.profile.about[INPUTS],
    }  # fmt: skip


@pytest.mark.parametrize(("recompute", "options"), [("all", {}), ("planned", {"budget": "70%"})])
def test_activations_are_recomputed_as_the_plan_that_is_made_in_the_loop_says(two, recompute, options, tmp_path):
    for rank in two.run(as_ddp_recomputing, recompute, options | {"profiles": str(tmp_path)}, timeout_s=200.0):
        assert rank["differs"] == [] and "full" in rank["choices"] and rank["inputs"] == "1000 x 8"
        assert rank["budget"] is None or rank["peak"] <= rank["budget"]


def recomputed_when_needed(folder: str) -> tuple[list[set[str]], list[str], list[bool]]:
    """Choices and lines of three starts; whether the kept profile knows recomputation. One rank of two."""
    choices, said, known = [], [], []
    for budget in ("100%", "70%", "100%"):
        with contextlib.redirect_stderr(io.StringIO()) as lines:
            torch.manual_seed(0)
            model = blocks()
            optimizer = OPTIMIZERS["adam"](model.parameters())
            with mdcs.parallelize(model, optimizer, budget=budget, seconds=0.2, timeout_s=30, profiles=folder) as parallel:
                choosing(parallel, lambda _, model=model: nn.functional.cross_entropy(model(deep(1000, 0)), TARGETS))
                choices.append({*parallel.plan.recompute})
            dist.barrier()
        said.append(lines.getvalue())
        [kept] = map(Path.read_text, Path(folder).iterdir())
        known.append(is_measured(mdcs.Profile.from_json(kept)))
    return choices, said, known


def test_recomputation_is_measured_and_planned_where_no_other_plan_keeps_the_budget(two, tmp_path):
    for rank, (choices, said, known) in enumerate(two.run(recomputed_when_needed, str(tmp_path), timeout_s=200.0)):
        assert [bool(each) for each in choices] == [False, True, False]
        assert rank or ["units recompute their activations" in each for each in said] == [False, True, False]
        assert known == [False, True, True]
