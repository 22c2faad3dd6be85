"""What Hydra and OmegaConf raise while composing a config, as one line with the full key.

Hydra's messages run over several lines, name search paths, and advise to append an unknown key with "+",
which would hide a typo.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from experiments.config.schema import ConfigError, fields_by_key, shown

CONF = Path(__file__).resolve().parents[2] / "conf"
"""The folder of YAML files: one folder per group, one file per option."""

_TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
_UNKNOWN = re.compile(r"Could not (?:override|append to config\.)\s*'([^']+)'")
_OPTION = re.compile(r"Could not find '([^']+)'")
_VALUE = re.compile(r"[Vv]alue '(.*)' (?:of type|is not a valid)")


def explain(
    error: HydraException | OmegaConfBaseException | ValueError, overrides: Sequence[str] = ()
) -> ConfigError:
    """The same complaint as a ConfigError, its message one line; `overrides` is what was asked for."""
    if isinstance(error, ConfigError):
        return error
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, (ConfigAttributeError, ConfigKeyError)) and cause.full_key:
        return unknown_key(cause.full_key)
    if isinstance(cause, ValidationError) and cause.full_key:
        return _wrong_type(cause, str(error))
    if isinstance(error, MissingConfigException) and (option := _OPTION.search(str(error))):
        return _unknown_option(option.group(1))
    if isinstance(error, OverrideParseException):
        reason = next((line for line in str(error).splitlines() if not line.startswith("Error parsing")), "")
        return ConfigError(
            error.override.partition("=")[0], f"is not key=value ({reason.strip()}), got {error.override}"
        )
    if str(error).startswith("Could not delete"):
        return ConfigError(
            str(error).split("'")[1], "cannot be deleted; set it to null where that is allowed"
        )
    if unknown := _UNKNOWN.search(str(error)):
        return unknown_key(unknown.group(1))
    if ambiguous := re.match(r"Ambiguous value for argument '([^=']+)=(.*)'", str(error)):
        return ConfigError(
            ambiguous.group(1), f"is one value, got {ambiguous.group(2)}: to run one job for each, add -m"
        )
    if "Config group override must be" in str(error):  # names neither the group nor the value
        for group, _, name in (override.partition("=") for override in overrides):
            if group in groups() and name not in groups()[group]:
                return _unknown_option(f"{group}/{name}")
    return ConfigError("config", " ".join(str(error).split()))


def unknown_key(key: str) -> ConfigError:
    """The complaint about a key that does not exist, with the nearest one that does."""
    known = [*fields_by_key(), *groups()]
    # Compared as a whole first, then by its last part: `scheduler.buget_mib`, but also `steps` for
    # `run.steps`.
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if not near:
        last_parts = {name.rpartition(".")[2]: name for name in reversed(known)}
        near = [
            last_parts[n]
            for n in difflib.get_close_matches(key.rpartition(".")[2], last_parts, n=1, cutoff=0.75)
        ]
    return ConfigError(key, f"no such key; did you mean {near[0]}?" if near else "no such key")


def groups() -> dict[str, list[str]]:
    """The config groups and their options."""
    folders = (folder for folder in sorted(CONF.iterdir()) if folder.is_dir())
    return {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}


def _unknown_option(path: str) -> ConfigError:
    group, _, option = path.partition("/")
    options = groups().get(group)
    if options is None:
        return ConfigError(path, "no such config")
    return ConfigError(group, f"no such option {option}; options: {', '.join(options)}")


def _wrong_type(cause: ValidationError, message: str) -> ConfigError:
    key = (cause.full_key or "").partition("[")[0]
    declared = fields_by_key().get(key)
    if declared is None:
        if key in groups():
            return ConfigError(key, f"must be one of its options: {', '.join(groups()[key])}")
        return ConfigError(key, "must hold keys and values")
    kind = str(declared.type).removesuffix(" | None")
    if kind not in _TYPES and "choices" in declared.metadata:
        wanted = f"one of {', '.join(map(shown, declared.metadata['choices']))}"
    elif kind.startswith("list["):
        wanted = f"a list, each value {_TYPES[kind[5:-1]]}"
    else:
        wanted = _TYPES[kind] + (" or null" if str(declared.type).endswith("None") else "")
    override = re.search(rf"{re.escape(key)}=(.*)", message)
    value = _VALUE.search(str(cause))
    got = override.group(1) if override else value.group(1) if value else "null"
    return ConfigError(key, f"must be {wanted}, got {got or 'nothing'}")
