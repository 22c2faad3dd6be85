"""Options of Hydra's group `budget` that are no files: `budget=40GiB`, `75% of ddp` and `floor+10%`.

A config source answers `budget/TEXT` with `budget.limit`. `register` makes it known to Hydra.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from mdcs.sizes import Budget

GROUP = "budget"


class BudgetSource(ConfigSource):
    """Budgets in words, as configs."""

    @staticmethod
    def scheme() -> str:
        return "mdcs-budget"

    def load_config(self, config_path: str) -> ConfigResult:
        found = _budget(config_path)
        if found is None:
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


def register() -> None:
    """Make budgets in words known to Hydra."""
    for plugin in (BudgetSource, BudgetPath):
        Plugins.instance().register(plugin)
