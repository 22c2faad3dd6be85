"""Groups of options: make an object of the dataclass that a mapping's `_target_` names.

The class may be in this repository or in any other package. Its options are the fields that
:func:`mdcs.options.option` has declared. No other key is accepted. Each value must have the field's type and be within
its limits, and errors that `__post_init__` raises are reported too. A missing key has the class's default.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config import files
from experiments.config.files import CONF
from experiments.config.schema import ConfigError
from experiments.tasks.own import KINDS, class_of, located
from mdcs.options import OptionError, check_value, options, shown

TARGET = "_target_"
_METHODS = {
    "model": ("build",), "data": ("batches",), "optimizer": ("make",), "strategy": ("choose", "plan"),
    "scheduler": ("schedule",), "recompute": ("choices",), "engine": ("prepare",), "tracker": ("mirror",),
}  # fmt: skip
"""Methods by group; an object of the group must have at least one of them."""


def make(group: str, given: Any, choice: str | None = None, *, retargeted: bool = False) -> Any:
    """Make the object that a group's mapping describes. Raises ConfigError. choice: the option's name, for errors.
    retargeted: `_target_` is another than that of the option."""
    if not isinstance(given, dict) or TARGET not in given:
        raise ConfigError(group, f"needs a {TARGET}: package.module.Class")
    cls = load(group, str(given[TARGET]), given)
    if retargeted and hasattr(cls, "builder") and (CONF / group / f"{choice}.yaml").exists():
        problem = f"{given[TARGET]} does not take the keys of {group}={choice}: add {group}=own"
        raise ConfigError(f"{group}.{TARGET}", problem)
    declared = options(cls)
    values = {str(key): value for key, value in given.items() if key != TARGET}
    if (unknown := next((name for name in values if name not in declared), None)) is not None:
        of = f"{group}={choice}" if choice and not retargeted else cls.__name__
        hint = f"its keys: {', '.join(declared)}" if declared else "it has none"
        if near := difflib.get_close_matches(unknown, declared, n=1, cutoff=0.7):
            hint = f"did you mean {group}.{near[0]}?"
        raise ConfigError(f"{group}.{unknown}", f"no such key of {of}; {hint}")
    values = {name: _typed(f"{group}.{name}", cls, name, value) for name, value in values.items()}
    if missing := [name for name, field in declared.items() if "needed" in field.metadata and name not in values]:
        raise ConfigError(f"{group}.{missing[0]}", f"is an argument that {given[TARGET]} needs")
    if "name" in declared and not values.get("name") and hasattr(cls, "builder"):
        values["name"] = cls.__name__
    try:
        for name, value in values.items():
            check_value(name, value, declared[name].metadata)
        made = cls(**values)
    except OptionError as error:
        raise ConfigError(f"{group}.{error.option}", error.complaint) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(group, str(error)) from error
    if not getattr(made, "name", ""):
        raise ConfigError(f"{group}.{TARGET}", f"{given[TARGET]} has no name, for tables")
    return made


def load(group: str, target: str, given: Mapping[str, Any] = MappingProxyType({})) -> type:
    """Load the dataclass at this path, and check that it has a method that the group needs. Raises ConfigError. For a
    model, data or an optimizer, any other callable is one that makes it (:mod:`experiments.tasks.own`). given: the
    config's mapping."""
    key = f"{group}.{TARGET}"
    try:
        found = located(target)
    except ModuleNotFoundError as error:
        known = sorted({str(files.values(path).get(TARGET)) for path in (CONF / group).glob("[!_]*.yaml")})
        now = next((each for each in known if each.rpartition(".")[2] == target.rpartition(".")[2]), None)
        hint = "is it installed, or on PYTHONPATH?" if now is None else f"did you mean {now}?"
        raise ConfigError(key, f"{error}; {hint}") from error
    except ValueError as error:
        raise ConfigError(key, str(error)) from error
    if group in KINDS and callable(found) and not dataclasses.is_dataclass(found):
        try:
            return class_of(group, found, target, {name: each for name, each in given.items() if name != TARGET})
        except OptionError as error:
            raise ConfigError(f"{group}.{error.option}", error.complaint) from error
        except (TypeError, ValueError) as error:
            raise ConfigError(key, f"{target}: {error}") from error
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        kind = "no dataclass" if group not in KINDS else f"a {type(found).__name__}, not a class or a function"
        raise ConfigError(key, f"{target} is {kind}")
    if not any(hasattr(found, method) for method in _METHODS[group]):
        raise ConfigError(key, f"{target} has no method {' or '.join(_METHODS[group])}")
    try:
        _schema(found)
    except (OmegaConfBaseException, NameError) as error:
        raise ConfigError(key, f"{target}: {str(error).partition(chr(10))[0]}") from error
    return found


def plain(made: Any) -> dict[str, Any] | None:
    """The mapping from which `make` makes an equal object, with every option. None for None."""
    if made is None:
        return None
    told = {TARGET: getattr(made, "target", f"{type(made).__module__}.{type(made).__qualname__}")}
    for name in options(made):
        value = getattr(made, name)
        told[name] = list(value) if isinstance(value, tuple) else value
    return told


def wanted(kind: Any, limits: Mapping[str, Any]) -> str:
    """Describe the type of an option, e.g. "an integer or null"."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    parts = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    known = [part for part in parts if part is not type(None)]
    if len(known) > 1 and "choices" in limits:
        return f"one of {', '.join(map(shown, limits['choices']))}"
    said = [
        f"a list, each value {words[typing.get_args(part)[0]]}"
        if typing.get_origin(part) in (list, tuple)
        else words.get(part, str(part))
        for part in known
    ]
    return " or ".join([*said, *(["null"] if type(None) in parts else [])])


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _typed(key: str, cls: type, name: str, value: Any) -> Any:
    kind = types_of(cls)[name]
    try:
        merged: Any = OmegaConf.merge(_schema(cls), {name: value})
        made = merged[name]
    except OmegaConfBaseException as error:
        got = shown(value) if value != "" else "nothing"
        raise ConfigError(key, f"must be {wanted(kind, options(cls)[name].metadata)}, got {got}") from error
    if isinstance(made, DictConfig):
        return OmegaConf.to_container(made)
    if not isinstance(made, ListConfig):
        return made
    return tuple(made) if "tuple" in str(kind) else list(made)


@functools.cache
def _schema(cls: type) -> DictConfig:
    return OmegaConf.structured(cls, flags={"readonly": False})  # as that of a frozen dataclass is
