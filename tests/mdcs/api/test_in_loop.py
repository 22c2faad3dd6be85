"""One call for a start: the plan is made in the loop's first step, and every step is DDP's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mdcs

STEPS = 4


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


def cast(model: Callable[..., Any], seed: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return texts(model, seed)


JOBS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]] = {
    "blocks": (blocks, texts, "adam"),
    "images": (Images, images, "sgd"),
    "pairs": (blocks, pairs, "adamw"),
    "autocast": (blocks, cast, "adam"),
}
OPTIMIZERS = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
}


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
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=dist.new_group())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)
    losses = []
    for step in range(STEPS):
        for micro in range(micro_steps):
            if not ours:
                model.require_backward_grad_sync = micro == micro_steps - 1
            loss = loss_of(model, 1000 * step + 10 * micro + dist.get_rank()) / micro_steps
            loss.backward()
            losses.append(loss.item())
        if not ours and clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    numbers = torch.rand(3).tolist()
    if not ours:
        return losses, {k: v.clone() for k, v in model.module.state_dict().items()}, numbers, optimizer.state_dict()
    state, saved = parallel.state_dict(), optimizer.state_dict()
    assert parallel.steps == STEPS and parallel.plan.micro_steps == micro_steps
    if budget is not None:
        assert parallel.plan.prediction.peak_bytes <= parallel.plan.budget
    parallel.close()
    assert all(torch.equal(v, state[name]) for name, v in model.state_dict().items())
    return losses, state, numbers, saved


def both(name: str, options: dict[str, Any]) -> list[str]:
    """Names of values that differ from DDP's."""
    wanted, found = loop(name, False, **{k: v for k, v in options.items() if k != "budget"}), loop(name, True, **options)
    out = [what for what, i in (("losses", 0), ("numbers", 2)) if wanted[i] != found[i]]
    out += [key for key, value in wanted[1].items() if "running" not in key and not torch.equal(value, found[1][key])]
    for number, own in wanted[3]["state"].items():
        theirs = found[3]["state"][number]
        out += [f"{number} {key}" for key, value in own.items() if not torch.equal(torch.as_tensor(value), theirs[key])]
    return out


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("blocks", {"micro_steps": 2, "budget": "75%"}),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in (
                ("blocks", {}), ("blocks", {"clip_norm": 1e6}), ("images", {}), ("pairs", {}), ("autocast", {"budget": "1 GiB"}),
            )
        ),
    ],
)
def test_every_step_is_ddps_from_the_first(two, name, options):
    assert two.run(both, name, options, timeout_s=200.0) == [[], []]


def resumed(root: str) -> list[str]:
    """Two steps and a checkpoint, then a new start that resumes in its first step: what differs from four steps."""

    def started() -> tuple[nn.Module, torch.optim.Optimizer, mdcs.Parallel]:
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
