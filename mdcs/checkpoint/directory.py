"""Checkpoint folders: ``ROOT/step-00000100`` is complete once it has this name; it is renamed to it last.

The manifest inside has the size of every file. A folder that is being written or deleted has another name. Besides the
tensors a folder has files of plain values, such as random states.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

MANIFEST = "manifest.json"
RUN = "run.pt"
"""Name of the file with the values that all ranks have in common."""
_PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message names the folder, and the file or parameter."""


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step."""
    return root / f"step-{step:08}"


def rank_file(rank: int) -> str:
    """Return the name of the file with the values of one rank alone."""
    return f"rank-{rank:05}.pt"


def partial(folder: Path) -> Path:
    """Return the folder in which a step is written before its ``folder`` is complete."""
    return folder.with_name(folder.name + _PARTIAL)


def begin(folder: Path) -> Path:
    """Make the partial folder of a step, empty; delete folders that others left half-written or half-deleted."""
    for left in folder.parent.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(left)
    partial(folder).mkdir(parents=True)
    return partial(folder)


def write(file: Path, data: bytes) -> None:
    """Write a file that survives a crash of the machine."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def finish(folder: Path, files: Iterable[str]) -> Path:
    """Write the manifest of these ``files``, then rename the folder so that it counts as complete, in the place of an
    older one. Raises CheckpointError for a file that some rank wrote to another file system.
    """
    writing, sizes = partial(folder), {}
    for name in sorted(files):
        if not (writing / name).is_file():
            raise CheckpointError(f"{writing}: {name} is missing: all ranks must see one folder")
        sizes[name] = (writing / name).stat().st_size
    write(writing / MANIFEST, json.dumps({"files": sizes}, indent=1).encode())
    _sync(writing)
    if folder.exists():
        _delete(folder)
    writing.rename(folder)
    _sync(folder.parent)
    return folder


def keep_last(root: Path, count: int) -> None:
    """Delete all complete folders but the newest ``count``."""
    for folder in complete_checkpoints(root)[count:]:
        _delete(folder)


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the complete folders, the newest first."""
    steps = {int(match[1]): path for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def candidates(path: Path) -> list[Path]:
    """Return ``path`` itself if it is the folder of a step, else the complete folders in it, the newest first."""
    return [path] if _NAME.fullmatch(path.name) else complete_checkpoints(path)


def choose(among: Sequence[Path], problem: Callable[[Path], str | None], *, warns: bool = True) -> Path | None:
    """Return the first of :func:`candidates` without a ``problem``; None where there are no candidates. ``warns``: of
    every folder of a root that was not chosen. Raises CheckpointError if no folder can be used.
    """
    refused: list[str] = []
    for folder in among:
        reason = problem(folder)
        if reason is None:
            for other in refused if warns else ():
                warnings.warn(f"not read: {other}", stacklevel=3)
            return Path(folder)
        refused.append(f"{folder}: {reason}")
    if refused:
        raise CheckpointError("; ".join(refused))
    return None


def find_problem(folder: Path) -> str | None:
    """Return why a folder cannot be used, with the file's name; None if every file has its size."""
    try:
        for file, size in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"].items():
            path = folder / file
            if not path.is_file():
                return f"{file} is missing"
            if path.stat().st_size != size:
                return f"{file} has {path.stat().st_size} bytes, not the {size} that were written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was not finished"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def _delete(folder: Path) -> None:
    """Rename first, so that the folder stops counting as complete before its files go."""
    gone = folder.with_name(f"{folder.name}.deleted{_PARTIAL}")
    folder.rename(gone)
    shutil.rmtree(gone)


def _sync(folder: Path) -> None:
    """Sync the folder: its new names then survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- plain values


def encode(value: Any, what: str) -> bytes:
    """Return a value as ``torch.save`` writes it. Raises ValueError, naming ``what`` it is, where :func:`load` would
    refuse it.
    """
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, weights_only=True)
    except Exception as error:
        raise ValueError(f"{what} may hold numbers, strings, containers and tensors only: {error}") from error
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
