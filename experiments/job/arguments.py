"""The command line: errors about arguments that Hydra would accept, lists of values, and the text of `--help`."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.config.checks import composing
from experiments.config.errors import unknown_key
from experiments.config.files import CONF, added_folders, groups, primary
from experiments.config.schema import OPTION_GROUPS, OWN, Config, ConfigError, fields_by_key
from experiments.config.targets import TARGET, load
from mdcs.options import options, shown
from mdcs.planner.pipeline import decides_schedule

_WIDTH, _INDENT = 110, 34  # columns of the help, and of what is left of its explanations


def submits(arguments: Sequence[str]) -> bool:
    """Return whether a command line without `-m` submits a job, and does not only show something."""
    shows = {"-h", "--help", "-c", "--cfg", "-i", "--info", "-sc", "--shell-completion"}
    no = {"-m", "--multirun", "hydra.mode=RUN"} | shows
    launches = any(each.startswith(("hydra/launcher=mdcs_", "hydra/launcher=slurm_")) for each in arguments)
    return launches and not any({each, each.partition("=")[0]} & no for each in arguments)


def prepared(arguments: Sequence[str], lists: Callable[[Sequence[str]], list[str]] | None) -> list[str]:
    """Return the command line as Hydra takes it: flags of a sweep before all overrides, and lists of values by `lists`.
    A job that is submitted is a sweep of one. Raises ConfigError."""
    made = sorted(arguments, key=lambda argument: argument not in ("-m", "--multirun"))
    if lists is not None and not {"-m", "--multirun"} & {*made}:
        made = lists(made)
    return ["-m", *made] if submits(made) else made


_FLAGS = ("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion",
          "config-path", "config-name", "config-dir", "experimental-rerun", "info")  # fmt: skip
"""Hydra's flags, without their dashes."""


def require_own(argument: str, own: Sequence[str]) -> None:
    """Raise ConfigError for overrides that Hydra would take for something else, and keys of another program."""
    plain = argument.lstrip("-")
    key, _, value = plain.partition("=")
    # Hydra makes a traceback of these.
    if key.lstrip("+") in groups() and re.match(r"\[(.*,)?\s*[\d.]+\s*[,\]]", value):
        raise ConfigError(key, f"takes names of options, which are files in conf/{key.lstrip('+')}/, got {value}")
    if plain != argument and (ours := [f"{group}.{key}" for group in own if f"{group}.{key}" in fields_by_key()]):
        raise ConfigError(argument, f"is {ours[0]}=VALUE")
    name = key.replace("-", "_")
    if plain != argument and (
        key in (known := (*groups(), *fields_by_key())) or argument.startswith("--") and key not in _FLAGS
    ):
        near = name if name in known else str(unknown_key(name)).partition("did you mean ")[2].rstrip("?")
        raise ConfigError(argument, f"overrides have no dashes: {near or 'KEY'}=VALUE")
    if argument.endswith(",") or argument.startswith(","):
        raise ConfigError(key or argument, f"a list has no spaces: KEY=A,B, or in quotes 'KEY=A, B'; got {argument}")
    group, dot, name = key.lstrip("+~").partition(".")
    if group == "run" and name in ("varied", "sweep"):  # which the program sets
        raise unknown_key(key)
    if dot and "=" in argument and group in OWN and group not in own:
        raise ConfigError(key, f"is for mdcs {OWN[group]}")


def values_of(argument: str) -> tuple[str, list[str]]:
    """The key of an override and its values, if it has several (a range or an interval is one text); else no values."""
    if argument.startswith(("-", "hydra")) or "=" not in argument:
        return argument, []
    try:
        override = OverridesParser.create().parse_override(argument)
        if override.is_sweep_override():
            values = override.sweep_string_iterator() if override.is_choice_sweep() else [argument.partition("=")[2]]
            return override.get_key_element(), [*map(str, values)]
    except HydraException:  # which Hydra reports
        pass
    return argument.partition("=")[0], []


def with_lists(
    arguments: Sequence[str], keys: Mapping[str, str], *, keep_first: bool = False, rest: str = "",
    alone: Sequence[str] = (),
) -> list[str]:
    """Return the arguments with each list of values (KEY=A,B) of these keys under the key that holds the list.

    - keys: the key that holds the list, by the key that is typed.
    - keep_first: the job has the first value of each list.
    - rest: the key that holds the overrides with lists of all other keys. Empty: Hydra refuses them.
    - alone: keys of which one value is a list of one.

    Raises ConfigError for a list that is given by both keys.
    """
    out, others = list[str](), list[str]()
    for argument in arguments:
        key, values = values_of(argument)
        values = values or [argument.partition("=")[2]] * (key in alone and "=" in argument)
        if values and rest and key not in keys and key.partition(".")[0] != rest.partition(".")[0]:
            others.append(argument)
            continue
        if values and key in keys:
            if any(each.startswith(f"{keys[key]}=") for each in arguments):
                raise ConfigError(key, f"{argument} and {keys[key]} are the same list: give one of them")
            out += [f"{key}={values[0]}"] if keep_first else []
            argument = f"{keys[key]}=[{','.join(values)}]"
        out.append(argument)
    return [*out, f"{rest}={json.dumps(others)}"] if others else out


def require_one_job(settings: Any, overrides: Sequence[str]) -> None:
    for key in (override.partition("=")[0] for override in overrides):
        if key.startswith("sweep."):
            raise ConfigError(key, "is for a sweep (-m)")
    choice = settings.runtime.choices.get("hydra/launcher", "basic")
    if choice != "basic" and "hydra.mode=RUN" not in settings.overrides.hydra:
        raise ConfigError("hydra/launcher", f"{choice} runs the jobs of a sweep: add -m, for a single job too")


def unused_of(config: Config, overrides: Sequence[str]) -> list[str]:
    """The overrides that have no effect because the strategy decides the schedule itself."""
    if not decides_schedule(config.strategy):
        return []
    return [each for each in overrides if each.partition("=")[0].partition(".")[0] == "scheduler"
            or each.startswith(("budget.schedule_share=", "budget.activation_share="))
            and not each.endswith("=null")]  # fmt: skip


def help_text(about: str, arguments: Sequence[str], own: Sequence[str] = ()) -> str:
    """Return the help of the program whose docstring is `about`, with the options and values of a command line. own:
    groups of `OWN` that this program has. Raises Hydra's errors for overrides that cannot be composed, and ConfigError
    for a class that cannot be loaded."""
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
            lines += _entry(f"{group}={option}{mark}", says)
    lines += ["", "Keys (KEY=VALUE) of the chosen options, as they are now"]
    for group in (field.name for field in dataclasses.fields(Config) if field.name not in {*OWN} - {*own}):
        if group not in OPTION_GROUPS:
            declared = {key: leaf for key, leaf in fields_by_key().items() if key.startswith(f"{group}.")}
            keys = {key: (OmegaConf.select(composed, key), leaf) for key, leaf in declared.items()}
        elif OmegaConf.is_missing(given := composed[group], TARGET):
            continue
        else:
            declared = options(load(group, str(given[TARGET])))
            keys = {f"{group}.{name}": (given.get(name, leaf.default), leaf) for name, leaf in declared.items()}
        lines += [""] if keys else []
        for key, (value, leaf) in keys.items():
            lines += _entry(f"{key}={'{…}' if isinstance(value, Mapping) and value else shown(value)}", meaning(leaf))
    more = "-m runs a job for every combination of KEY=VALUE,VALUE. --cfg job prints the config and runs nothing."
    return "\n".join([*lines, "", more])


def _entry(head: str, body: str) -> list[str]:
    head = f"  {head}".ljust(_INDENT - 1) + " "
    indent = " " * _INDENT
    wrapped = textwrap.wrap(body, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    return wrapped if body else [head.rstrip()]


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
