"""What `--help` prints: the groups with their options, and every key with its value, meaning and limits."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.config.errors import CONF, groups
from experiments.config.schema import fields_by_key, shown

_WIDTH, _INDENT = 110, 34


def text(about: str, overrides: Sequence[str]) -> str:
    """The help of the program whose docstring is `about`; options and values are those that `overrides` give.

    Raises what Hydra raises for overrides that cannot be composed.
    """
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("config", overrides=list(overrides), return_hydra_config=True)
    chosen = composed.hydra.runtime.choices
    lines = [about.strip(), "", "Groups (GROUP=OPTION), with * at the chosen ones; their files are in conf/", ""]
    for group, options in groups().items():
        marked = [f"{option}*" if option == chosen.get(group) else option for option in options]
        lines += _entry(group, ", ".join(marked), 14)
    lines += ["", "Keys (KEY=VALUE), as they are now"]
    above = None
    for key, declared in fields_by_key().items():
        group = key.rpartition(".")[0]
        lines += [] if group == above else [""]
        above = group
        lines += _entry(f"{key}={shown(OmegaConf.select(composed, key))}", _meaning(declared), _INDENT)
    more = "-m runs a job for every combination of KEY=VALUE,VALUE. --cfg job prints the config and runs nothing."
    return "\n".join([*lines, "", more])


def _entry(head: str, body: str, indent: int) -> list[str]:
    head = f"  {head}".ljust(indent - 1) + " "
    return textwrap.wrap(body, _WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False)


def _meaning(declared: dataclasses.Field[Any]) -> str:
    limits = declared.metadata
    words = [
        f"{sign} {limits[name]}"
        for name, sign in (("above", ">"), ("at_least", ">="), ("below", "<"), ("at_most", "<="))
        if name in limits
    ]
    if "choices" in limits:
        words.append(" | ".join(map(shown, limits["choices"])))
    if "used_by" in limits:
        words.append(f"for {', '.join(limits['used_by'])}")
    return f"{limits['about']} ({'; '.join(words)})" if words else str(limits["about"])
