"""Turn an error that Hydra or OmegaConf raises while composing into one line with the full key.

Hydra's messages have several lines and name search paths. For an unknown key they recommend "+", which would hide a
typo.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence

from hydra.conf import HydraConf
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import errors
from omegaconf.errors import OmegaConfBaseException

from experiments.config import schema
from experiments.config.files import CONF, groups, values
from experiments.config.schema import OPTION_GROUPS, ConfigError, fields_by_key
from experiments.config.targets import types_of, wanted
from hydra_plugins import mdcs_slurm

_OF_OTHERS = {
    ("strategy", "ddp"): "dp", ("strategy", "zero3"): "fsdp", ("strategy", "full_shard"): "fsdp",
    ("strategy", "shard_grad_op"): "sdp", ("strategy", "hybrid_shard"): "hsdp",
    ("cluster", "cuda"): "local cluster.device=cuda",
}  # fmt: skip
"""Names of options in DDP, FSDP and DeepSpeed, with mdcs's."""

_UNKNOWN = re.compile(r"Could not (?:override|append to config\.)\s*'([^']+)'")
_OPTION = re.compile(r"Could not find '([^']+)'")
_VALUE = re.compile(r"[Vv]alue '(.*)' (?:of type|is not a valid)")
_WORDS = {
    r"Cannot find (primary config) '([^']+)'": "no such config: {1}; without this flag it is conf/config.yaml",
    r"Could not delete[^']*'([^']+)'": "cannot be deleted; set it to null where that is allowed",
    r"Error merging override ~(\S+)": "cannot be deleted; set it to null where that is allowed",
    r"Could not append to config\. An item is already at '([^']+)'": "is set already: leave out the +",
    r"Multiple values for ([^ ]+)\.": "is set already: leave out the +",
    r"Ambiguous value for argument '([^=']+)=(.*)'": "is one value, got {1}: mdcs train -m runs one job for each",
    # a list for keys and values, or the other way about
    r"Error merging override \+*([^=]+)=(.*)": "has another type, got {1}",
}  # Hydra's words, of which the first group is the key, and ours


def explain(
    error: HydraException | OmegaConfBaseException | ValueError, overrides: Sequence[str] = ()
) -> ConfigError:
    """The same error as a ConfigError with a message of one line. `overrides` are those of the command line."""
    if isinstance(error, ConfigError):
        return error
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, (errors.ConfigAttributeError, errors.ConfigKeyError)) and cause.full_key:
        return unknown_key(_as_asked(cause.full_key, overrides))
    if isinstance(cause, errors.ValidationError) and cause.full_key:
        return _wrong_type(cause, str(error))
    if isinstance(cause, errors.MissingMandatoryValue) and cause.full_key:
        return ConfigError(cause.full_key, "has no default: give it a value")
    if isinstance(error, MissingConfigException) and (option := _OPTION.search(str(error))):
        return _unknown_option(option.group(1), error.options)
    if isinstance(error, OverrideParseException):
        key, equals, _ = error.override.partition("=")
        if not (key and equals):
            return ConfigError(key or "=", "is not KEY=VALUE, without spaces around the =")
        reason = next((line for line in str(error).splitlines() if not line.startswith("Error parsing")), "")
        return ConfigError(key, f"cannot be read ({reason.strip()}), got {error.override}")
    for pattern, words in _WORDS.items():
        if found := re.search(pattern, str(error)):
            key = "--config-name" if found[1] == "primary config" else found[1]
            return ConfigError(key, words.format(*found.groups()))
    if unknown := _UNKNOWN.search(str(error)):
        return unknown_key(_as_asked(unknown.group(1), overrides))
    if "Config group override must be" in str(error):  # names neither the group nor the value
        known = groups(overrides)
        for group, _, name in (override.partition("=") for override in overrides):
            if group in known and name not in known[group]:
                return _unknown_option(f"{group}/{name}", list(known[group]))
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return ConfigError(cause.full_key, str(cause).partition("\n")[0])
    return ConfigError("config", " ".join(str(error).split()))


def _as_asked(key: str, overrides: Sequence[str]) -> str:
    """The full key of the override, where Hydra names only its group because the group does not exist."""
    keys = [override.lstrip("+").partition("=")[0] for override in overrides]
    return next((each for each in keys if each.startswith(f"{key}.")), key)


def unknown_key(key: str) -> ConfigError:
    parts = {"launcher": mdcs_slurm.MdcsSlurmConf} | {
        name: part for name, part in types_of(HydraConf).items() if dataclasses.is_dataclass(part)
    }
    hydra_keys = [f"hydra.{name}.{field.name}" for name, part in parts.items() for field in dataclasses.fields(part)]
    if key.startswith("hydra.launcher.") and key in hydra_keys:
        return ConfigError(key, "is for hydra/launcher=mdcs_slurm")
    known = [*fields_by_key(), *groups(), *hydra_keys]
    group, _, name = key.rpartition(".")
    siblings = {each.rpartition(".")[2]: each for each in known if each.rpartition(".")[0] == group}
    files = [(group, CONF / group / f"{option}.yaml") for group in OPTION_GROUPS for option in groups()[group]]
    others = {name: f"{group}.{name}" for group, file in reversed(files) for name in values(file)}
    others |= {each.rpartition(".")[2]: each for each in reversed(known)}
    whole = {} if group and siblings else {each: each for each in known}
    # A name of the same group (`link.latncy_us`), else the whole key (`runs.steps`), else a name of any group
    # (`steps`).
    for asked, among, cutoff in ((name, siblings, 0.6), (key, whole, 0.75), (name, others, 0.75)):
        if near := difflib.get_close_matches(asked, among, n=1, cutoff=cutoff):
            return ConfigError(key, f"no such key; did you mean {among[near[0]]}?")
    return ConfigError(key, "no such key")


def _unknown_option(path: str, options: Sequence[str] | None) -> ConfigError:
    group, _, option = path.rpartition("/")
    if not options:
        return ConfigError(path, "no such config")
    if group == "budget":
        return ConfigError(group, f"no such limit {option}; a limit is 40GiB, '75% of ddp', floor+10% or none")
    known = sorted(name for name in {*options} if not name.startswith("_"))
    near = difflib.get_close_matches(option, known, n=1, cutoff=0.75)
    near = [_OF_OTHERS[group, option]] if (group, option) in _OF_OTHERS else near
    nearest = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(group, f"no such option {option}; options: {', '.join(known)}{nearest}")


def _wrong_type(cause: errors.ValidationError, message: str) -> ConfigError:
    key = (cause.full_key or "").partition("[")[0]
    declared = fields_by_key().get(key)
    if key.startswith("hydra."):
        return ConfigError(key, str(cause).partition("\n")[0])
    if declared is None:
        if key in groups():
            return ConfigError(key, f"must be one of its options: {', '.join(groups()[key])}")
        return ConfigError(key, "must hold keys and values")
    kind = types_of(types_of(schema.Config)[key.partition(".")[0]])[declared.name]
    override = re.search(rf"{re.escape(key)}=(.*)", message)
    value = _VALUE.search(str(cause))
    got = override.group(1) if override else value.group(1) if value else "null"
    return ConfigError(key, f"must be {wanted(kind, declared.metadata)}, got {got or 'nothing'}")
