"""Optimizers as people have them: all elementwise ones of torch.optim, and some written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

import mdcs


class ByHand(optim.Optimizer):
    """Updates parameter by parameter, with :meth:`update`."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Averaging(ByHand):
    """Keeps a moving average of gradients, and a count of its own."""

    def begun(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state.update(exp_avg=torch.zeros_like(p), count=0)
        state["count"] += 1
        average: Tensor = state["exp_avg"]
        return average


class Lion(Averaging):
    """As in its repository, with options that have no defaults."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average, (near, far) = self.begun(p), group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((average * near + gradient * (1 - near)).sign_(), alpha=-group["lr"])
        average.lerp_(gradient, 1 - far)


class Warming(optim.AdamW):
    """AdamW whose first steps are shorter."""

    def step(self, closure: Any = None) -> Any:
        rates = [group["lr"] for group in self.param_groups]
        for group in self.param_groups:
            steps = [float(self.state[p]["step"]) for p in group["params"] if p in self.state]
            group["lr"] *= min(1.0, (1 + max(steps, default=0)) / 3)
        super().step(closure)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


class Averaged(mdcs.WithAverage, optim.Adam):
    average_decay = 0.9


class Lamb(Averaging):
    """Its step is as long as the parameter is."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average = self.begun(p).lerp_(gradient, 0.1)
        p.add_(average, alpha=-group["lr"] * float(p.norm() / (average.norm() + 1e-6)))


class Shampoo(ByHand):
    """Matrices are multiplied from both sides, by what it keeps of their rows and columns."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state.update(left=torch.eye(p.shape[0]).to(p), right=torch.eye(p.shape[1]).to(p))
        state["left"] += gradient @ gradient.T
        state["right"] += gradient.T @ gradient
        p.sub_(torch.linalg.solve(state["left"], gradient) @ torch.linalg.inv(state["right"]), alpha=group["lr"])


class ByRow(ByHand):
    """Matrices of groups with ``by_row`` get no gradient that moves the mean of a row."""

    def __init__(self, params: Any, lr: float = 1e-3, by_row: bool = False) -> None:
        super().__init__(params, {"lr": lr, "by_row": by_row})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        mean = gradient.mean(1, keepdim=True) if group["by_row"] and p.dim() > 1 else 0
        p.sub_(gradient - mean, alpha=group["lr"])


class Joint(optim.SGD):
    """Its step depends on the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(float(p.grad.norm()) for p in group["params"] if p.grad is not None)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / norm)


class Blockwise(ByHand):
    """Its averages have 8 bits per block of 256 in parameters of 4,096 elements and more."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(gradient, 0.1)
        if average.numel() >= 4096:
            blocks = average.view(-1)[: average.numel() // 256 * 256].view(-1, 256)
            largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-20)
            blocks.copy_((blocks / largest * 127).round() * largest / 127)
        p.sub_(average, alpha=group["lr"])


class ByRowOfLarge(ByHand):
    """It divides the rows of matrices with 32 and more by their mean squares, which it may keep ``factored``."""

    def __init__(self, params: Any, lr: float = 1e-3, factored: bool = False) -> None:
        super().__init__(params, {"lr": lr, "factored": factored})

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        square, is_large = gradient.square(), p.dim() == 2 and min(p.shape) >= 32
        if is_large and group["factored"]:
            square = square.mean(1, keepdim=True)
        kept = self.state[p].setdefault("square", torch.zeros_like(square)).lerp_(square, 0.1)
        p.sub_(gradient / ((kept.mean(1, keepdim=True) if is_large else kept).sqrt() + 1e-8), alpha=group["lr"])


class OwnCount(optim.SGD):
    """It counts its steps itself, and its rate depends on the count ``since`` a step."""

    def __init__(self, params: Any, lr: float = 1e-3, since: int = 0) -> None:
        super().__init__(params, lr)
        self.since, self.steps = since, {"made": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps["made"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / max(1, self.steps["made"] - self.since))


class Sending(optim.SGD):
    """It sends its parameters, as KellerJordan's MuonWithAuxAdam does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                dist.broadcast(p.data, 0)


class Stacking(optim.Optimizer):
    """It updates the matrices of a group as a stack, as nanochat's MuonAdamW does. Their momenta are the first one's state."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            gradients = torch.stack([p.grad for p in group["params"]])
            state = self.state[group["params"][0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradients)).lerp_(gradients, 0.5)
            for p, update in zip(group["params"], momentum / momentum.norm(dim=(1, 2), keepdim=True), strict=True):
                p.sub_(update, alpha=group["lr"])


class Flagged(optim.SGD):
    """Whether it decays is an attribute of the object, as the options of AdaBelief's first version are."""

    def __init__(self, params: Any, lr: float = 1e-3, decays: bool = True) -> None:
        super().__init__(params, lr)
        self.decays = decays

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9 if self.decays else 1.0).add_(p.grad, alpha=-group["lr"])


class Lookahead(optim.Optimizer):
    """As timm's: it steps another optimizer, and goes back half of the way every second time."""

    def __init__(self, base_optimizer: optim.Optimizer) -> None:
        self._base_optimizer, self.param_groups = base_optimizer, base_optimizer.param_groups


class ScheduleFree(optim.SGD):
    """Evaluation has other weights than training."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Counting(optim.Optimizer):
    """It counts in its parameter group, with a tensor, as timm's Lamb does."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("k", torch.zeros(())).add_(1)
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / group["k"])


class Remembering(optim.SGD):
    """It keeps the gradient itself, whose memory is another's after the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                last = self.state[p].get("last", torch.zeros_like(p))
                p.add_(p.grad + last, alpha=-group["lr"])
                self.state[p]["last"] = p.grad


def two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Matrices with momentum, the rest without."""
    return [
        {"params": [p for p in parameters if p.dim() > 1], "momentum": 0.9},
        {"params": [p for p in parameters if p.dim() <= 1], "lr": 2e-3},
    ]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], optim.Optimizer]] = {
    "rmsprop": lambda ps: optim.RMSprop(two_groups(ps), lr=1e-3, centered=True),
    "adagrad": lambda ps: optim.Adagrad(ps, lr=1e-2, initial_accumulator_value=0.1),
    "nadam": lambda ps: optim.NAdam(ps, lr=1e-2, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda ps: optim.RAdam(ps, lr=1e-2),
    "adamax": lambda ps: optim.Adamax(ps, lr=1e-2),
    "adadelta": lambda ps: optim.Adadelta(ps, lr=0.5),
    "asgd": lambda ps: optim.ASGD(ps, lr=1e-2, t0=2),
    "rprop": lambda ps: optim.Rprop(ps, lr=1e-3),
    "lion": lambda ps: Lion(ps, 1e-3, (0.9, 0.99), weight_decay=0.1),
    "subclass": lambda ps: Warming(ps, lr=1e-2, amsgrad=True),
    "foreach": lambda ps: optim.NAdam(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: optim.Adagrad(ps, lr=1e-2, fused=True),
    "maximizing": lambda ps: optim.RMSprop(ps, lr=1e-4, maximize=True),
    "maximizing amsgrad": lambda ps: optim.AdamW(ps, lr=1e-4, maximize=True, amsgrad=True),
    "counting": lambda ps: Counting(two_groups(ps), lr=1e-2),
    "averaged": lambda ps: Averaged(ps, lr=1e-2),
    "flagged": lambda ps: Flagged(ps, lr=1e-3, decays=False),
}

WHOLE: dict[str, Callable[[list[nn.Parameter]], list[optim.Optimizer]]] = {
    "muon": lambda ps: [optim.Muon(matrices(ps), lr=0.02), optim.AdamW(others(ps), lr=3e-3, weight_decay=0.01)],
    "adafactor": lambda ps: [optim.Adafactor(ps, lr=0.05)],
    "lamb": lambda ps: [Lamb(ps, lr=1e-2)],
    "shampoo": lambda ps: [optim.SGD(others(ps), lr=0.05, momentum=0.9), Shampoo(matrices(ps))],
    "stacking": lambda ps: [optim.SGD(others(ps), lr=0.05), Stacking([{"params": [p]} for p in matrices(ps)], lr=1e-2)],
    "by row": lambda ps: [ByRow([{"params": others(ps)}, {"params": matrices(ps), "by_row": True}], lr=0.05)],
}
"""Optimizers that need whole parameters, with those that take the rest."""

SEVERAL: dict[str, Callable[[list[nn.Parameter]], list[optim.Optimizer]]] = {
    "three": lambda ps: [
        optim.AdamW(matrices(ps), lr=1e-2), optim.SGD(others(ps)[1:], lr=0.05, momentum=0.9),
        optim.RMSprop(others(ps)[:1], lr=1e-3),
    ],
    **{name: make for name, make in WHOLE.items() if name in ("muon", "shampoo")},
}  # fmt: skip
"""Several optimizers, each with some of the parameters."""


def matrices(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Those of hidden layers: the first is the embedding."""
    return [p for p in parameters[1:] if p.dim() == 2]


def others(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The rest: embedding, norms and biases."""
    return [p for i, p in enumerate(parameters) if not i or p.dim() != 2]
