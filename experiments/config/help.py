"""The text of `--help`: the groups with their options, and every key with its value, meaning and limits."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from experiments.config.checks import composing
from experiments.config.files import CONF, added_folders, groups, primary
from experiments.config.schema import OPTION_GROUPS, OWN, Config, fields_by_key
from experiments.config.targets import TARGET, load
from mdcs.options import options, shown

_WIDTH, _INDENT = 110, 34


def text(about: str, arguments: Sequence[str], own: Sequence[str] = ()) -> str:
    """Return the help of the program whose docstring is `about`, with the options and values of a command line.

    own: groups of `OWN` that this program has.

    Raises Hydra's errors for overrides that cannot be composed, and ConfigError for a class that cannot be loaded.
    """
    overrides = [each for each in arguments if "=" in each and not each.startswith(("-", "hydra.searchpath="))]
    name, folders = primary(arguments), [CONF, *(folder.resolve() for folder in added_folders(arguments))]
    home = next((folder for folder in folders if (folder / name).with_suffix(".yaml").exists()), CONF)
    if others := [str(folder) for folder in folders if folder != home]:
        overrides.append(f"hydra.searchpath=[{','.join(others)}]")
    with composing(home):
        composed = compose(name, overrides=overrides, return_hydra_config=True)
    chosen = composed.hydra.runtime.choices
    lines = [about.strip(), "", "Groups (GROUP=OPTION), with * at the chosen ones; their files are in conf/"]
    for group, told in groups(arguments).items():
        if group in OWN and group not in own:
            continue
        lines.append("")
        for option, says in told.items():
            mark = "*" if option == chosen.get(group) else ""
            lines += _entry(f"{group}={option}{mark}", says, _INDENT)
    lines += ["", "Keys (KEY=VALUE) of the chosen options, as they are now"]
    declared = fields_by_key()
    for group in (field.name for field in dataclasses.fields(Config) if field.name not in {*OWN} - {*own}):
        keys = _of_class(composed, group) if group in OPTION_GROUPS else {
            key: (OmegaConf.select(composed, key), leaf) for key,
            leaf in declared.items() if key.startswith(f"{group}.")
        }  # fmt: skip
        lines += [""] if keys else []
        for key, (value, leaf) in keys.items():
            lines += _entry(
                f"{key}={'{…}' if isinstance(value, Mapping) and value else shown(value)}", meaning(leaf), _INDENT
            )
    more = "-m runs a job for every combination of KEY=VALUE,VALUE. --cfg job prints the config and runs nothing."
    return "\n".join([*lines, "", more])


def _of_class(composed: DictConfig, group: str) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    """Value and field of every option of the class that a group's mapping names, if it names one, by full key."""
    given = composed[group]
    if OmegaConf.is_missing(given, TARGET):
        return {}
    declared = options(load(group, str(given[TARGET])))
    return {f"{group}.{name}": (given.get(name, leaf.default), leaf) for name, leaf in declared.items()}


def _entry(head: str, body: str, indent: int) -> list[str]:
    head = f"  {head}".ljust(indent - 1) + " "
    if not body:
        return [head.rstrip()]
    return textwrap.wrap(body, _WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False)


def meaning(declared: dataclasses.Field[Any]) -> str:
    """The description of an option, with its limits and choices in parentheses."""
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
