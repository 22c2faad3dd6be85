"""What a checkpoint has beside tensors of the model: plain values in files of their own, random numbers among them."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

RUN = "run.pt"
"""The file of what all ranks have in common."""


def save(file: Path, value: Any, what: str) -> None:
    """Raises ValueError, with ``what`` it was, for what :func:`load` could not read again."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise ValueError(f"{what} may have plain numbers, texts, containers and tensors only: {error}") from error
    with file.open("wb") as stream:
        stream.write(data.getbuffer())


def load(file: Path) -> Any:
    """What was saved, on the host; nothing is called that a file names."""
    return torch.load(file, weights_only=True, map_location="cpu")


def random_state(device: torch.device) -> dict[str, Any]:
    """Of torch, of a CUDA device, of Python and of numpy."""
    name, words, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(words).astype(np.int64)), *map(float, rest)),
    }


def set_random_state(saved: dict[str, Any], device: torch.device) -> None:
    """Go on with the random numbers from there."""
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda" and saved["device"] is not None:
        torch.cuda.set_rng_state(saved["device"], device)
    random.setstate(saved["python"])
    name, words, at, has_gauss, gauss = saved["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), int(at), int(has_gauss), gauss))
