"""The identity of a loop's job: all that its profile depends on, as far as the live objects tell."""

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
from mdcs.profiler.consensus import all_gather_object
from mdcs.profiler.timing import machine_id
from mdcs.telemetry.memory_meter import current_meter

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_RATES = ("lr", "initial_lr", "params", "param_names")
"""Entries of a parameter group on which no time depends."""


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
        "memory": " ".join(
            sorted(name for name, size in (current_meter(device).live() or {}).items() if size is not None)
        ),
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
