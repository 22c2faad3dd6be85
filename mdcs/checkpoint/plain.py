"""Checkpoints without ranks: whole, for plain PyTorch and for Hugging Face's libraries."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mdcs.checkpoint import folder, numbers, pieces
from mdcs.checkpoint.folder import CheckpointError
from mdcs.checkpoint.numbers import RUN


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """A checkpoint on the host: ``model`` and ``optimizer``, as ``load_state_dict`` of plain ones take them, and ``step``.

    ``path`` is that of a step, or the root, of which the newest that is whole is read, with a warning for every newer one.
    ``torch.save`` writes what comes back, and ``weights_only`` reads it. Raises CheckpointError where none is whole.
    """
    chosen = _choose(Path(path))
    run = numbers.load(chosen / RUN)
    tree = pieces.whole(chosen)
    state, groups = tree.get("optimizer", {}).get("state", {}), []
    places: dict[str, int] = {}
    for group in run["param_groups"]:
        own = [places.setdefault(name, len(places)) for name in group["params"]]
        groups.append({**group, "params": own})
    packed = {"state": {place: state[name] for name, place in places.items() if name in state}, "param_groups": groups}
    return {"model": tree["model"], "optimizer": packed, "step": run["step"]}


class Pretrained(Protocol):
    """A model of transformers, as far as it matters here."""

    def state_dict(self) -> dict[str, Tensor]:
        """By plain name."""
        ...

    def save_pretrained(self, save_directory: str, *, state_dict: dict[str, Tensor]) -> object:
        """Write its configuration and these weights."""
        ...


def export_pretrained(path: str | Path, model: Pretrained, to: str | Path, *, prefix: str = "") -> None:
    """Write a checkpoint in Hugging Face's layout, for ``from_pretrained``, in the precision that ``model`` has.

    ``model`` has the configuration; its weights are left alone. It is named ``prefix`` (such as "model.") in the one that was
    trained. Raises CheckpointError, by name, for a parameter that the checkpoint lacks.
    """
    saved, weights = read_checkpoint(path)["model"], {}
    for name, value in model.state_dict().items():
        if prefix + name not in saved:
            raise CheckpointError(f"{path}: it has no {prefix}{name}")
        weights[name] = saved[prefix + name].to(value.dtype)
    model.save_pretrained(str(to), state_dict=weights)


def _choose(path: Path) -> Path:
    one = folder.is_name(path.name)
    problems = []
    for candidate in [path] if one else folder.found(path):
        problem = folder.problem(candidate)
        if problem is None:
            return candidate
        problems.append(f"{candidate}: {problem}")
        if not one:
            warnings.warn(f"not read: {problems[-1]}", stacklevel=3)
    raise CheckpointError("; ".join(problems) or f"{path}: there is no checkpoint")
