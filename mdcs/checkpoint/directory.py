"""Checkpoint folders: ``ROOT/step-00000100`` is complete once it has this name; it is renamed to it last.

The manifest inside has the size and the SHA-256 of every file. A folder that is being written or deleted has another
name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
SCHEMA = 1
_PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)")

Sums = dict[str, list[Any]]
"""By file name: [size in bytes, SHA-256]."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message names the folder, and the file or parameter."""


def step_name(step: int) -> str:
    """Return the name of the folder of a step."""
    return f"step-{step:08}"


def partial_path(root: Path, step: int) -> Path:
    """Return the folder in which a step is written before it is complete."""
    return root / (step_name(step) + _PARTIAL)


def begin(root: Path, step: int) -> Path:
    """Make the partial folder of a step, empty; delete folders that others left half-written or half-deleted."""
    for left in root.glob(f"step-*{_PARTIAL}"):
        shutil.rmtree(left)
    made = partial_path(root, step)
    made.mkdir(parents=True)
    return made


def checksums(files: Iterable[Path]) -> Sums:
    """Return size and SHA-256 of files that are written."""
    return {file.name: [file.stat().st_size, _sha256(file)] for file in files}


def finish(root: Path, step: int, files: Sums, **about: Any) -> Path:
    """Write the manifest, then rename the folder so that it counts as complete. Replaces an older folder of this step.

    Raises CheckpointError for a file that some rank wrote to another file system.
    """
    writing, made = partial_path(root, step), root / step_name(step)
    for name, (size, _) in files.items():
        if not (writing / name).is_file() or (writing / name).stat().st_size != size:
            raise CheckpointError(f"{writing}: {name} is not here: all ranks must see one folder")
    manifest = {"schema": SCHEMA, "step": step, **about, "files": dict(sorted(files.items()))}
    manifest["sha256"] = _sha256_of(manifest)
    with (writing / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(writing)
    if made.exists():
        _delete(made)
    writing.rename(made)
    _sync(root)
    return made


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
    """Return the first of :func:`candidates` without a ``problem``; None where there are no candidates.

    ``warns``: warn of every folder of a root that was not chosen. Raises CheckpointError if no folder can be used.
    """
    refused: list[str] = []
    for folder in among:
        told = problem(folder)
        if told is None:
            for other in refused if warns else ():
                warnings.warn(f"not read: {other}", stacklevel=3)
            return Path(folder)
        refused.append(f"{folder}: {told}")
    if refused:
        raise CheckpointError("; ".join(refused))
    return None


def find_problem(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Return why a folder cannot be used, with the file's name; None if this rank finds nothing wrong.

    The ``world`` ranks share the files: each checks the size and the SHA-256 of every ``world``-th file.
    """
    try:
        manifest = read_manifest(folder)
        for file, (size, sha256) in [*manifest["files"].items()][rank::world]:
            path = folder / file
            if not path.is_file():
                return f"{file} is missing"
            if path.stat().st_size != size:
                return f"{file} has {path.stat().st_size} bytes, not the {size} that were written"
            if _sha256(path) != sha256:
                return f"{file} is not what was written: its SHA-256 differs"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest. Raises CheckpointError if it is missing, damaged, or of another schema."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest.pop("sha256") == _sha256_of(manifest)
    except FileNotFoundError:
        raise CheckpointError(f"it has no {MANIFEST}: it was not finished") from None
    except (ValueError, KeyError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{MANIFEST} is not what was written")
    if manifest["schema"] != SCHEMA:
        raise CheckpointError(f"{MANIFEST} has schema {manifest['schema']}, this version reads {SCHEMA}")
    assert isinstance(manifest, dict)
    return manifest


def _delete(folder: Path) -> None:
    """Rename first, so that the folder stops counting as complete before its files go."""
    gone = folder.with_name(f"{folder.name}.deleted{_PARTIAL}")
    folder.rename(gone)
    shutil.rmtree(gone)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sha256_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync(folder: Path) -> None:
    """Sync the folder: its new names then survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
