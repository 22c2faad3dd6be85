"""Named ranges around the phases of messages, for torch's profiler and for NVTX."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mdcs.torch_compat import is_profiled

_NOTHING = nullcontext()


def named_range(phase: str, *what: object) -> AbstractContextManager[Any]:
    """Return a context whose body is ``mdcs::<phase> <what>`` in a trace. Without a profiler it costs next to nothing."""
    if not is_profiled():
        return _NOTHING
    return torch.profiler.record_function(" ".join([f"mdcs::{phase}", *map(str, what)]))
