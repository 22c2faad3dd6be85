"""Options: a YAML file each, in conf/ and in folders that a user adds, one folder per group; and budgets in words."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mdcs.sizes import Budget

CONF = Path(__file__).resolve().parents[2] / "conf"  # the folder of this repository


def groups(arguments: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """The groups, their options, and a description of each option: the comment at the beginning of its file. Files
    whose names begin with "_" hold what options of a group have in common, and are not options. Reads conf/ and the
    folders that a command line adds with ``--config-dir FOLDER`` or ``hydra.searchpath=[…]``."""
    out: dict[str, dict[str, str]] = {}
    for folder in [CONF, *added_folders(arguments)]:
        for group in sorted(folder.iterdir()) if folder.is_dir() else ():
            if group.is_dir() and group.name != "hydra":
                told = {file.stem: _about(file) for file in group.glob("[!_]*.yaml")}
                out[group.name] = dict(sorted({**told, **out.get(group.name, {})}.items()))
    return out


def values(file: Path) -> dict[str, Any]:
    """The values of an option's file, with those of its defaults in the same folder."""
    own = yaml.safe_load(file.read_text(encoding="utf-8"))
    inherited = [values(file.with_name(f"{name}.yaml")) for name in own.pop("defaults", [])]
    return {key: value for given in [*inherited, own] for key, value in given.items()}


def added_folders(arguments: Sequence[str]) -> list[Path]:
    """The folders of YAML files that a command line adds to conf/."""
    named = _flag(arguments, "--config-dir", "-cd")
    for value in (each.partition("=")[2] for each in arguments if each.startswith("hydra.searchpath=")):
        named += [each for part in value.strip("[]").split(",") if (each := part.strip(" '\""))]
    return [_folder(name) for name in named]


def primary(arguments: Sequence[str]) -> str:
    """The name of the config that a command line begins with: that of ``--config-name NAME``, else config."""
    return (_flag(arguments, "--config-name", "-cn") or ["config"])[-1]


def _flag(arguments: Sequence[str], *names: str) -> list[str]:
    """The values of a flag, given as ``--flag VALUE`` or ``--flag=VALUE``."""
    apart = [b for a, b in zip(arguments, arguments[1:], strict=False) if a in names]
    parts = (each.partition("=") for each in arguments)
    return apart + [value for key, equals, value in parts if equals and key in names]


def _folder(name: str) -> Path:
    if name.startswith("pkg://"):
        with suppress(ModuleNotFoundError):  # Hydra reports it
            return Path(str(importlib.resources.files(name.removeprefix("pkg://").replace("/", "."))))
    return Path(name.removeprefix("file://"))


def _about(file: Path) -> str:
    said = re.match(r"(?:# @package .*\n)?# (.*)", file.read_text(encoding="utf-8"))
    return said.group(1) if said else ""


# ---- budgets in words: `budget=40GiB`, `75% of ddp` and `floor+10%` are options of a group, and no files

GROUP = "budget"


class BudgetSource(ConfigSource):
    """Answers `budget/TEXT` with `budget.limit`."""

    @staticmethod
    def scheme() -> str:
        return "mdcs-budget"

    def load_config(self, config_path: str) -> ConfigResult:
        if (found := _budget(config_path)) is None:
            raise ConfigLoadError(f"{config_path} is no budget")
        config = OmegaConf.create({"limit": str(found)})
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": None})

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") == GROUP

    def is_config(self, config_path: str) -> bool:
        return _budget(config_path) is not None

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


def _budget(config_path: str) -> Budget | None:
    group, _, text = config_path.removesuffix(".yaml").partition("/")
    try:
        return Budget.of(text) if group == GROUP else None
    except ValueError:
        return None


class BudgetPath(SearchPathPlugin):
    """Search path with which Hydra also finds budgets that are written as words."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="mdcs", path=f"{BudgetSource.scheme()}://")


def register_budgets() -> None:
    for plugin in (BudgetSource, BudgetPath):
        Plugins.instance().register(plugin)
