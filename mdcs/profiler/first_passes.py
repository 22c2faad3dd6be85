"""The first step of a loop: how many backward passes it has, and what its calls of the model are, in words; and the
identity of the loop's job: all that its profile depends on, as far as the live objects tell.
"""

from __future__ import annotations

import dataclasses
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdcs.model.optimizers import Optimizers
from mdcs.model.units import ModelUnit
from mdcs.profile.cache import code_of, key_of, processor
from mdcs.profiler.consensus import all_gather_object, machine_id
from mdcs.profiler.stages import Listener
from mdcs.runtime.engine import Engine
from mdcs.runtime.errors import RunError
from mdcs.runtime.loop_access import WITH_GRADIENTS
from mdcs.telemetry.memory_meter import TOTAL, UNTAGGED, Reading, current_meter
from mdcs.torch_compat import ModuleHook, backward_pass, in_function_forward, version_of, without_torch_function

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_RATES = ("lr", "initial_lr", "params", "param_names")  # entries of a parameter group on which no time depends


class FirstPasses(Listener):
    """Listens to the first step of a run.

    ``given``: the number of backward passes, which the plan has. None: nobody knows it, so all of them are side passes,
    as in ``no_sync()``, and their gradients are reduced in ``step()``.

    ``modules``: those of the units. Their calls are known where they are not inside of one of the model, or of another.
    """

    def __init__(self, engine: Engine, modules: Sequence[nn.Module], given: int | None = None) -> None:
        # not the engine itself, which the model's hooks must not keep alive
        self._model, self._meter, self._device, self._rank = engine.model, engine.meter, engine.device, engine.rank
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        self._depth = 0  # calls under way, one inside of the other
        self._side, self._given = engine.sequencer.side, given
        self.forget()
        self._handles: list[Any] = []
        for module in {self._model, *modules}:
            self._handles += [
                module.register_forward_pre_hook(ModuleHook(self._called), with_kwargs=True, prepend=True),
                module.register_forward_hook(ModuleHook(self._returned), always_call=True),
            ]
        if given is None:
            self._side.counts, self._side.ended = True, self._backward_ended
        self._handles += [p.register_post_accumulate_grad_hook(self._accumulated) for p in self._trained]

    def forget(self) -> None:
        """Give up the passes so far, and their gradients."""
        self._calls: list[str] = []
        self._brings = False  # this backward pass has come to a parameter
        self._passes = self._loss_bytes = 0
        self._before_loss: Reading | None = None
        self._versions: dict[nn.Parameter, tuple[int, int]] = {}
        with without_torch_function():  # parameters may be closed: their gradients are being reduced
            for p in self._trained:
                p.grad = None

    def stop(self) -> None:
        """Listen no more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._side.counts, self._side.ended = False, None

    @property
    def micro_steps(self) -> int:
        """Number of backward passes of the step, without those in ``no_sync()``; 1 where all are in it."""
        return self._given or max(1, self._passes)

    @property
    def has_gradients(self) -> bool | None:
        """Return whether there is a backward pass that was counted; None where they are not counted."""
        return self._passes > 0 if self._given is None else None

    def check(self) -> None:
        """Raise RunError for a gradient that the loop has changed since backward."""
        for name, p in self._model.named_parameters():
            if p in self._versions and (p.grad is None or self._versions[p] != (id(p.grad), version_of(p.grad))):
                raise RunError(
                    f"rank {self._rank}, step 1: the gradient of {name} was changed by the loop. {WITH_GRADIENTS}"
                )
        self._versions.clear()

    def in_words(self) -> str:
        """Return all that is known of the passes: arguments, autocast, the loss's bytes, the number of passes."""
        calls = self._calls[: max(1, round(len(self._calls) / self.micro_steps))]
        return f"{'; '.join(calls)}; {round(self._loss_bytes / 1024)} KiB; {self.micro_steps}"

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if backward_pass() != -1:  # activation checkpointing
            return
        self._depth += 1
        has_gradients = torch.is_grad_enabled() or in_function_forward()
        if self._depth > 1 or not has_gradients or self._side.in_block:
            return
        name = next((name for name, own in self._model.named_modules() if own is module), "")
        device = self._device.type
        cast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        self._calls.append(f"{name} {described(args)} {described(kwargs)} {cast}")

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if backward_pass() != -1:
            return
        self._depth = max(0, self._depth - 1)
        if not self._depth:
            self._meter.window()
            self._before_loss = self._meter.live()

    def _accumulated(self, p: nn.Parameter) -> None:
        if self._side.in_block:  # the loop may drop it
            self._versions.pop(p, None)
            return
        if not self._brings:
            self._brings = True
            self._loss_bytes = max(self._loss_bytes, _untagged(self._meter.window()) - _untagged(self._before_loss))
        if self._given is None:
            self._versions[p] = id(p.grad), version_of(p.grad)  # type: ignore[arg-type]

    def _backward_ended(self) -> None:
        self._passes += self._brings
        self._brings = False


def _untagged(reading: Reading | None) -> int:
    reading = reading or {}
    return reading.get(UNTAGGED) or reading.get(TOTAL) or 0


# ---- the job


def key_of_job(model: nn.Module, units: Sequence[ModelUnit], optimizers: Optimizers, step: str) -> str:
    """Return the key under which this job's profile is kept, the same on all ranks. Collective.

    It depends on modules (classes, their code, plain attributes), parameters and buffers (names, shapes, types), units,
    the optimizers' classes and options, the ``step`` in words, processors or GPUs, hosts, threads, and versions; not on
    what connects the hosts.
    """
    device = units[0].parameters[0][1].device
    own = {
        "modules": "; ".join(f"{name}: {_module(module)}" for name, module in model.named_modules()),
        "code": code_of(*map(type, (*model.modules(), *optimizers.members))),
        "parameters": "; ".join(f"{name}: {described(p)}" for name, p in model.named_parameters()),
        "buffers": "; ".join(f"{name}: {described(b)}" for name, b in model.named_buffers()),
        "units": "; ".join(f"{unit.name}: {' '.join(name for name, _ in unit.parameters)}" for unit in units),
        "optimizer": "; ".join(
            f"{type(optimizer).__name__} {len(group['params'])} "
            f"{described({k: v for k, v in group.items() if k not in _RATES})}"
            for optimizer in optimizers.members
            for group in optimizer.param_groups
        ),
        "step": step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": str(torch.get_num_threads()),
        "memory": " ".join(sorted(k for k, size in (current_meter(device).live() or {}).items() if size is not None)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    ranks = all_gather_object((own, machine_id()))
    hosts = list(dict.fromkeys(host for _, host in ranks))
    return key_of({f"rank {i}": f"host {hosts.index(host)} {parts}" for i, (parts, host) in enumerate(ranks)})


def described(value: Any) -> str:
    """Return a value in words: shapes and types of tensors; "" for objects of which nothing is known."""
    if isinstance(value, Tensor):
        grad = " grad" if value.requires_grad else ""
        return f"{value.dtype} {list(value.shape)} {value.device.type}{grad}"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(described, value))})"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)) or dataclasses.is_dataclass(value):
        return _ADDRESS.sub("", repr(value))
    return described(value.to_dict()) if callable(getattr(value, "to_dict", None)) else ""


def _module(module: nn.Module) -> str:
    own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    return f"{type(module).__qualname__}({module.extra_repr()}) {described(own)}"
