"""Runs in a forked process: it has none of their threads, and shares their connections. There a run is over.

The process may leave the ``with`` block and end as it likes: nothing is sent, and nothing is waited for.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist


class Run(Protocol):
    """A run, which ends in a forked process without a word to the other ranks."""

    def forget(self) -> None:
        """End without the other ranks, and without threads."""


_runs: WeakSet[Run] = WeakSet()


def forget_in_child(run: Run) -> None:
    """Let ``run`` be forgotten in processes that are forked from now on."""
    _runs.add(run)


def _in_child() -> None:
    for run in list(_runs):
        run.forget()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(run))  # keeps its process groups: they end by waiting for their threads
    if dist.is_initialized():
        gc.freeze()  # nor may the last collection, at the exit, find groups that were used and are garbage


os.register_at_fork(after_in_child=_in_child)
