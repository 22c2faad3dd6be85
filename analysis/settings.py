"""Settings in words: what the keys and values of a config are called in tables, pictures and names of runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def short(key: str, keys: Iterable[str]) -> str:
    """The key without its group, where no other of the keys ends alike. The name of a group's option is the group, as
    typed."""
    group, _, last = key.rpartition(".")
    if last == "name":
        return group
    return key if sum(other.rpartition(".")[2] == last for other in keys) > 1 else last


def is_seed(key: str) -> bool:
    """Whether runs that differ in this setting alone are repetitions of each other."""
    return key.rpartition(".")[2] == "seed"


def value(of: Any) -> str:
    """A value as it is typed in a config."""
    return str(of).lower() if isinstance(of, bool) else f"{of:g}" if isinstance(of, float) else str(of)
