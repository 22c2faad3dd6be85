"""Checkpoints without ranks: read whole, for plain PyTorch."""

from __future__ import annotations

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
    chosen = folder.choose(folder.candidates(Path(path)), folder.problem)
    if chosen is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    run = numbers.load(chosen / RUN)
    tree = pieces.whole(chosen)
    state, groups = tree.get("optimizer", {}).get("state", {}), []
    places: dict[str, int] = {}
    for group in run["param_groups"]:
        own = [places.setdefault(name, len(places)) for name in group["params"]]
        groups.append({**group, "params": own})
    packed = {"state": {place: state[name] for name, place in places.items() if name in state}, "param_groups": groups}
    return {"model": tree["model"], "optimizer": packed, "step": run["step"]}
