"""Long work before training, such as downloads and tokenization: one rank first, the others with what it leaves in
caches."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from launch import status

T = TypeVar("T")

_TURNS = 3
_PATIENCE = datetime.timedelta(days=7)
"""The watchdog ends a job in which no rank works: a rank that waits for its turn needs no limit."""


def prepared(phase: str, make: Callable[[], T], *, in_turn: bool = False) -> T:
    """Return what `make` returns, on every rank. The job is not taken for hung while `make` computes or writes files.

    in_turn: rank 0 goes first, then one rank of each other host, then the rest. Collective.
    """
    status.set(phase=phase)
    if not in_turn or not dist.is_initialized() or dist.get_world_size() == 1:
        with status.working():
            return make()
    turn = 0 if dist.get_rank() == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    for each in range(_TURNS):
        if each == turn:
            with status.working():
                made = make()
        dist.barrier(group)
    dist.destroy_process_group(group)
    return made
