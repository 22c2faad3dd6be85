"""The page that lists every option and key, as `--help` does: made from conf/ and the dataclasses that check it."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.config.files import CONF, groups, values
from experiments.config.help import meaning
from experiments.config.schema import OPTION_GROUPS, Config, fields_by_key
from experiments.config.targets import TARGET, load
from experiments.tasks.own import KINDS
from mdcs.options import options, shown


def page() -> str:
    """Markdown: a section per group, with its options and its keys; a group of options has keys per option."""
    lines = [
        "# Options and keys",
        "",
        "`GROUP=OPTION` chooses a file of `conf/`, `KEY=VALUE` sets one value, `-m` with lists makes a sweep. The "
        "same is",
        "said by `python experiments/train.py --help`, for the options chosen there. This page is made from the code.",
    ]
    told = groups()
    declared = fields_by_key()
    for group in (field.name for field in dataclasses.fields(Config)):
        lines += ["", f"## {group}", ""]
        lines += [f"- `{group}={option}`: {says}" for option, says in told.get(group, {}).items()]
        if group in OPTION_GROUPS:
            lines += _keys_by_option(group)
        else:
            lines += _table(
                [(key, leaf.default, leaf) for key, leaf in declared.items() if key.startswith(f"{group}.")]
            )
    for group in ("debug", "experiment"):
        lines += ["", f"## {group}", ""]
        lines += [f"- `{group}={option}`: {says}" for option, says in told[group].items()]
    return "\n".join(lines) + "\n"


def _keys_by_option(group: str) -> list[str]:
    """A table per class of a group's options, with the values that its first file gives."""
    named: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for file in (CONF / group / f"{option}.yaml" for option in groups()[group]):
        given = values(file)
        named.setdefault(given[TARGET], []).append((file.stem, given))
    lines = []
    for target, files in named.items():
        declared = options(KINDS[group] if target == "???" else load(group, target))
        if declared:
            (first, shown_values), *others = files
            lines += ["", f"Keys of {' and '.join(f'`{name}`' for name, _ in files)}"]
            lines[-1] += f" (values of `{first}`):" if others else ":"
            lines += _table(
                [(f"{group}.{name}", shown_values.get(name, leaf.default), leaf) for name, leaf in declared.items()]
            )
    return lines


def _table(rows: list[tuple[str, Any, dataclasses.Field[Any]]]) -> list[str]:
    lines = ["", "| key | value | what |", "|---|---|---|"]
    for key, value, leaf in rows:
        default = leaf.default_factory() if value is dataclasses.MISSING and callable(leaf.default_factory) else value
        what = meaning(leaf).replace("|", "\\|")
        lines.append(f"| `{key}` | `{shown(default)}` | {what} |")
    return lines
