"""Optimizers of torch.optim and of public packages, on two ranks under dp, zero2 and fsdp: right, or refused with a sentence.

    python -m tests.examples.optimizers [PACKAGE…]        # those that are not installed are left out

Three steps of a small language model, and of one with matrices of 160 × 160, in which optimizers find what is large. "Right" is
DDP's weights bit for bit; Muon has AdamW beside it.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import mdcs
from mdcs.model.optimizers import Optimizers, Updates
from tests.mdcs import optimizers as by_hand
from tests.mdcs.optimizers import OPTIMIZERS, WHOLE, matrices, others
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, differing, distance, plan_for, profile_of, setup

STEPS = 3
MODELS = "tied", "line-160-160-160-8"
Parameters = list[nn.Parameter]
Made = Callable[[Parameters], list[optim.Optimizer]]


def orthogonal(g: Tensor) -> Tensor:
    x = g / (g.norm() + 1e-7)
    x = x.mT if g.size(0) > g.size(1) else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if g.size(0) > g.size(1) else x


class SingleDeviceMuonWithAuxAdam(optim.Optimizer):
    """As KellerJordan's: groups with ``use_muon`` by Muon, the others by Adam."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([{"lr": 0.02 if group["use_muon"] else 3e-4, **group} for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)

    def update(self, p: Tensor, group: dict[str, Any]) -> None:
        state, g = self.state[p], p.grad
        assert g is not None
        if group["use_muon"]:
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(p)).lerp_(g, 0.05)
            p.add_(orthogonal(g.lerp(momentum, 0.95)), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)
            return
        if not state:
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p), step=0)
        state["step"] += 1
        first, second = state["exp_avg"].lerp_(g, 0.1), state["exp_avg_sq"].lerp_(g.square(), 0.05)
        first, second = first / (1 - 0.9 ** state["step"]), second / (1 - 0.95 ** state["step"])
        p.add_(first / (second.sqrt() + 1e-10), alpha=-group["lr"])


class MuonWithAuxAdam(SingleDeviceMuonWithAuxAdam):
    """The same, each matrix on one rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        world, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            own = group["params"]
            padded = own + [torch.empty_like(own[-1])] * (-len(own) % world)
            for i in range(0, len(own), world) if group["use_muon"] else ():
                if i + rank < len(own):
                    self.update(own[i + rank], group)
                dist.all_gather(padded[i : i + world], padded[i + rank].data)
            for p in own if not group["use_muon"] else ():
                self.update(p, group)


def two_kinds(kind: Any) -> Made:
    return lambda ps: [kind([{"params": matrices(ps), "use_muon": True}, {"params": others(ps), "use_muon": False}])]


def of_package(module: str, **options: dict[str, Any]) -> dict[str, Made]:
    """Return all optimizers of a module; those for matrices alone have AdamW beside them."""
    found: dict[str, Made] = {}
    for name, kind in vars(importlib.import_module(module)).items():
        if not inspect.isclass(kind) or not issubclass(kind, optim.Optimizer) or kind is optim.Optimizer or name[0] == "_":
            continue
        if kind.__module__.startswith("torch.") and module != "torch.optim":
            continue

        def make(ps: Parameters, name: str = name, kind: Any = kind) -> list[optim.Optimizer]:
            given = {"lr": 1e-3, **options.get(name, {})}
            if "Lookahead" in name or "Wrapper" in name:
                return [kind(optim.SGD(ps, lr=1e-2))]
            if name == "Muon" and module == "torch.optim":
                return [kind(matrices(ps), **given), optim.AdamW(others(ps))]
            return [kind(ps, **{k: v for k, v in given.items() if k in inspect.signature(kind).parameters})]

        found[name] = make
    return found


HAND = ("OwnCount", "Counting", "Blockwise", "ByRowOfLarge", "Flagged", "Joint", "Remembering", "Averaged")
PACKAGES: dict[str, Callable[[], dict[str, Made]]] = {
    "torch.optim": lambda: of_package("torch.optim"),
    "lion-pytorch": lambda: {
        "Lion": lambda ps: [importlib.import_module("lion_pytorch").Lion(ps)],
        "Lion (foreach)": lambda ps: [importlib.import_module("lion_pytorch.foreach").Lion(ps)],
    },
    "timm": lambda: {
        **of_package("timm.optim"),
        "Lamb (max_grad_norm=None)": lambda ps: [importlib.import_module("timm.optim").Lamb(ps, max_grad_norm=None)],
    },
    "schedulefree": lambda: of_package("schedulefree"),
    "KellerJordan's Muon": lambda: {k.__name__: two_kinds(k) for k in (SingleDeviceMuonWithAuxAdam, MuonWithAuxAdam)},
    "by hand": lambda: {
        **{name: lambda ps, name=name: [getattr(by_hand, name)(ps)] for name in HAND},  # type: ignore[misc]
        **{name: WHOLE[name] for name in ("lamb", "shampoo", "by row")},
        "Lion, written here": lambda ps: [OPTIMIZERS["lion"](ps)],
    },
}


def tried(package: str, name: str) -> str:
    """Return "right", "right, whole", how far weights are from DDP's, or the sentence of a refusal. Collective."""
    make, outcomes = PACKAGES[package]()[name], []
    for model_name, strategy in itertools.product(MODELS, ("dp", "zero2", "fsdp")):
        job, made, plain = Job(model_name, optimizer=f"{package}/{name}"), setup(model_name), setup(model_name)
        try:
            ours, theirs = (make([p for p in m.model.parameters() if p.requires_grad]) for m in (made, plain))
            units = mdcs.partition(made.model, made.policy)
            whole = any(part.layout.whole for part in Updates(Optimizers(ours)).parts)
            plan = plan_for(job, How(strategy), profile_of(job, How(), made, units, ours))
            with mdcs.parallelize(made.model, ours, plan, units, timeout_s=20) as parallel:
                ddp = nn.parallel.DistributedDataParallel(plain.model, process_group=dist.new_group())
                for step in range(STEPS):
                    for model, optimizers in ((made.model, ours), (ddp, theirs)):
                        made.loss(model, made.batch(step, 0, dist.get_rank())).backward()
                        for optimizer in optimizers:
                            optimizer.step()
                            optimizer.zero_grad()
                state, wanted = parallel.state_dict(), plain.model.state_dict()
                is_equal, right = not differing(state, wanted), "right, whole" if whole else "right"
                outcomes.append(right if is_equal else f"{right} but for {distance(state, wanted):.0e}")
        except (mdcs.UnsupportedModel, mdcs.PlanError, ValueError) as error:
            return f"refused: {str(error).partition(': ')[2]}"
        except Exception as error:
            return f"{type(error).__name__} under {strategy}: {error}"
    return max(outcomes, key=len)


def main(asked: list[str]) -> None:
    ranks, print_ = Ranks(2), sys.stdout.write
    print_("| from | optimizer | how it goes |\n|---|---|---|\n")
    for package, found in PACKAGES.items():
        if asked and package not in asked:
            continue
        try:
            names = list(found())
        except ImportError as error:
            print_(f"| {package} | | not tried: {error} |\n")
            continue
        results: dict[str, list[str]] = {}
        for name in names:
            outcomes = ranks.outcomes(tried, package, name, timeout_s=120)
            said = {o.value if o.ok else f"{o.kind}: {o.message} (exit {o.exit_code})" for o in outcomes}
            results.setdefault(" / ".join(sorted(said)), []).append(name)
        for result, own in results.items():
            print_(f"| {package} | {', '.join(own)} | {result} |\n")
            sys.stdout.flush()
    ranks.stop()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
