"""The page that lists every option and key, as `--help` does: made from conf/ and the dataclasses that check it."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.config.files import CONF, groups, values
from experiments.config.schema import OPTION_GROUPS, Config, fields_by_key
from experiments.config.targets import TARGET, load
from experiments.job.arguments import meaning
from experiments.tasks.own import KINDS
from mdcs.options import options, shown


def page() -> str:
    """Markdown: a section per group, with its options and its keys; a group of options has keys per option."""
    lines = [
        "# Options and keys",
        "",
        "`GROUP=OPTION` chooses a file of `conf/`, `KEY=VALUE` sets one value, `-m` with lists makes a sweep.",
        "`mdcs train --help` says the same of the options chosen there. This page is made from the code.",
    ]
    told = groups()
    declared = fields_by_key()
    for group in (field.name for field in dataclasses.fields(Config)):
        lines += ["", f"## {group}", ""]
        lines += [f"- `{group}={option}`: {says}" for option, says in told.get(group, {}).items()]
        if group in OPTION_GROUPS:
            lines += _keys_by_option(group)
        else:
            lines += _list(
                [(key, leaf.default, leaf) for key, leaf in declared.items() if key.startswith(f"{group}.")]
            )
    for group in ("debug", "experiment"):
        lines += ["", f"## {group}", ""]
        lines += [f"- `{group}={option}`: {says}" for option, says in told[group].items()]
    return "\n".join(lines) + "\n"


def _keys_by_option(group: str) -> list[str]:
    """Return a list for each set of options that share keys, with the values of the set's first file."""
    owners: dict[tuple[str, str], list[str]] = {}
    rows: dict[tuple[str, str], tuple[str, Any, dataclasses.Field[Any]]] = {}
    keyed = []
    for file in (CONF / group / f"{option}.yaml" for option in groups()[group]):
        given = values(file)
        declared = options(KINDS[group] if given[TARGET] == "???" else load(group, given[TARGET]))
        keyed += [file.stem] if declared else []
        for name, leaf in declared.items():
            same = (name, meaning(leaf))
            owners.setdefault(same, []).append(file.stem)
            rows.setdefault(same, (f"{group}.{name}", given.get(name, leaf.default), leaf))
    lines = []
    for names in dict.fromkeys(map(tuple, owners.values())):
        others = [name for name in keyed if name not in names]
        of = "all but " if len(others) < len(names) and len(keyed) > 1 else ""
        of += ", ".join(f"`{name}`" for name in (others if of else names))
        of = of if others or len(keyed) == 1 else "all"
        first = f" (values of `{names[0]}`)" if len(names) > 1 else ""
        lines += ["", f"Keys of {of}{first}:"]
        lines += _list([rows[same] for same in owners if tuple(owners[same]) == names])
    return lines


def _list(rows: list[tuple[str, Any, dataclasses.Field[Any]]]) -> list[str]:
    lines = [""]
    for key, value, leaf in rows:
        default = leaf.default_factory() if value is dataclasses.MISSING and callable(leaf.default_factory) else value
        lines.append(f"- `{key}={shown(default)}`: {meaning(leaf)}")
    return lines if len(lines) > 1 else []
