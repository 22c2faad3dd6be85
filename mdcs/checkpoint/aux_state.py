"""The rest of a checkpoint besides the model's tensors: plain values in files of their own, and random states."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

RUN = "run.pt"
"""Name of the file with the values that all ranks have in common."""


def encode(value: Any, what: str) -> bytes:
    """Return a value as ``torch.save`` writes it. Raises ValueError, naming ``what`` it is, for a value that :func:`load`
    would refuse.
    """
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise ValueError(f"{what} may have plain numbers, texts, containers and tensors only: {error}") from error
    return data.getvalue()


def load(file: Path) -> Any:
    """Return a saved value, on the host. Runs no code that the file names (``weights_only``)."""
    return torch.load(file, weights_only=True, map_location="cpu")


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the random state of torch, of a CUDA device, of Python and of numpy."""
    name, words, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(words).astype(np.int64)), *map(float, rest)),
    }


def set_random_state(saved: dict[str, Any], device: torch.device) -> None:
    """Restore the random state that :func:`random_state` returned."""
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"], device)
    random.setstate(saved["python"])
    name, words, at, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), int(at), int(has_gauss), gauss))
