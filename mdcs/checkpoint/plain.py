"""Checkpoints without ranks: read whole, for plain PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from mdcs.checkpoint import folder, numbers, pieces
from mdcs.checkpoint.folder import CheckpointError
from mdcs.checkpoint.numbers import RUN


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint on the host: ``model`` and ``optimizer`` for a plain ``load_state_dict``, and ``step``.

    ``path`` is a step's folder, or the root: then the newest usable checkpoint is read, with a warning for every newer
    one. ``torch.save`` can write the result, and ``weights_only`` can read it back. Raises CheckpointError if no
    checkpoint is usable.
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
