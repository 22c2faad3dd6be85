"""Checkpoints without ranks: read whole, for plain PyTorch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from mdcs.checkpoint import aux_state, dcp_shards, directory
from mdcs.checkpoint.aux_state import RUN
from mdcs.checkpoint.directory import CheckpointError


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return a checkpoint on the host: ``model`` and ``optimizer`` for a plain ``load_state_dict``, and ``step``.

    Of several optimizers ``optimizer`` is a list.
    ``path`` is a step's folder, or the root: then the newest usable checkpoint is read, with a warning for every newer
    one. ``torch.save`` can write the result, and ``weights_only`` can read it back. Raises CheckpointError if no
    checkpoint is usable.
    """
    chosen = directory.choose(directory.candidates(Path(path)), directory.find_problem)
    if chosen is None:
        raise CheckpointError(f"{path}: there is no checkpoint")
    run = aux_state.load(chosen / RUN)
    tree = dcp_shards.load_full(chosen)
    state, groups = tree.get("optimizer", {}).get("state", {}), iter(run["param_groups"])
    counts = run.get("groups_by_optimizer", [len(run["param_groups"])])
    optimizers = [_packed(state, list(itertools.islice(groups, count))) for count in counts]
    return {"model": tree["model"], "optimizer": optimizers if len(optimizers) > 1 else optimizers[0], "step": run["step"]}


def _packed(state: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a state dict with numbers in the place of names."""
    places: dict[str, int] = {}
    numbered = [{**group, "params": [places.setdefault(name, len(places)) for name in group["params"]]} for group in groups]
    return {"state": {place: state[name] for name, place in places.items() if name in state}, "param_groups": numbered}
