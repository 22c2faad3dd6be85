"""Search for the plan with the least measured step time, within the budget, by training a few steps at a time.

    mdcs search experiment=search_timed search.trials=20 hydra.run.dir=results/search
    mdcs search strategy=zero2 scheduler=fusion,priority 'scheduler.bucket_mib=interval(1,64)' 'link.depth=range(1,5)'

Optuna proposes settings, and a job measures them. Keys with several values are searched: a list, Hydra's range(…), or
interval(LOW,HIGH), which is logarithmic from a factor of ten on; int(interval(LOW,HIGH)) is of whole numbers. Without
any, the search covers the fusion bytes of `scheduler=fusion`, the block bytes of `scheduler=priority`,
`budget.schedule_share` where there is a budget, and `link.depth`. A key of an option is searched only where that option
is chosen: `scheduler.bucket_mib` belongs to fusion. A trial is pruned, with the reason, if it cannot be planned or run,
or if its measured peak exceeds the budget. The folder has the study (study.db), trials.csv and the runs. A search in
the folder of an earlier one continues its study until it has `search.trials` trials. With hydra/launcher=mdcs_slurm the
trials are submitted, `hydra.launcher.parallel` at a time.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import optuna
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from analysis import load_run
from analysis.table import milliseconds, new_console, new_table
from experiments.config.checks import compose_config
from experiments.config.schema import Config, ConfigError
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.arguments import with_lists
from experiments.job.profiles import Profiles
from experiments.job.submission import launcher_of, run_submitted, with_ranks_of
from launch.claim import Occupied, claim
from mdcs.sizes import MIB

DEFAULT = (
    "scheduler=fusion,priority", "scheduler.bucket_mib=interval(0.25,64)", "scheduler.block_mib=interval(0.0625,8)",
    "link.depth=int(interval(1,4))",
)  # fmt: skip
SHARE = "budget.schedule_share=interval(0.0,1.0)"  # added if there is a budget to divide
STUDY, TABLE = "study.db", "trials.csv"
_LOGARITHMIC = 10.0  # ratio of HIGH to LOW from which an axis is logarithmic
_STARTUP = 8  # random trials before Optuna fits a model


@dataclass(frozen=True)
class Axis:
    """A key and its possible values: from low to high, or one of the choices."""

    key: str
    low: float = 0
    high: float = 0
    choices: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Axis:
        """The axis of an override with several values. Raises ConfigError."""
        try:
            override = OverridesParser.create().parse_override(text)
            key, values = override.get_key_element(), override.value()
            if key and isinstance(values, IntervalSweep):
                low, high = values.start, values.end
                if low is None or high is None or not -math.inf < low < high < math.inf:
                    raise ConfigError(
                        "search.over", f"interval(LOW,HIGH) needs finite numbers, LOW below HIGH; got {text}"
                    )
                return cls(key, low, high)
            elif key and override.is_sweep_override():
                return cls(key, choices=tuple(map(str, override.sweep_string_iterator())))
        except HydraException:
            pass
        raise ConfigError(
            "search.over", f"an axis is KEY=VALUE,VALUE, KEY=range(…) or KEY=interval(LOW,HIGH); got {text}"
        )

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def ends(self) -> tuple[str, ...]:
        """The choices, or the least and the greatest value."""
        return self.choices or (str(self.low), str(self.high))

    def suggest(self, trial: Trial) -> str:
        """An override with Optuna's proposal."""
        if self.choices:
            return f"{self.key}={trial.suggest_categorical(self.key, self.choices)}"
        is_log = self.low > 0 and self.high / self.low >= _LOGARITHMIC
        if isinstance(self.low, int) and isinstance(self.high, int):
            return f"{self.key}={trial.suggest_int(self.key, self.low, self.high, log=is_log)}"
        return f"{self.key}={trial.suggest_float(self.key, self.low, self.high, log=is_log):.6g}"


def main() -> int:
    """Run the search of the command line. Return the exit code."""

    def search(config: Config, folder: Path) -> str:
        given = [each for each in HydraConfig.get().overrides.task if not each.startswith("search.")]
        return Search(config, given, folder, HydraConfig.get()).run()

    lists = partial(with_lists, keys={}, rest="search.over")
    return app.run(app.Program(search, own=("search",), lists=lists, submits=True))


class Search:
    """One study. Raises ConfigError before anything is started."""

    def __init__(self, config: Config, given: Sequence[str], out: Path, settings: Any) -> None:
        launcher = launcher_of(settings)
        self.submits = None if launcher is None else settings
        self.at_once = 1 if launcher is None else settings.launcher.parallel
        self.compose = (
            compose_config if launcher is None else partial(compose_config, adapt=partial(with_ranks_of, launcher))
        )
        self.key = "hydra.run.dir" if launcher is None else "hydra.sweep.dir"
        if launcher is not None and not settings.launcher.wait:
            raise ConfigError("hydra.launcher.wait", "must be true: a search waits for its trials")
        self.given, self.out, self.trials = given, out.resolve(), config.search.trials
        self.console, self.known = Console(stderr=True), Profiles()
        over = config.search.over or [*DEFAULT, *([SHARE] if config.budget.limited else [])]
        self.axes = [Axis.parse(text) for text in over]
        if twice := [key for key, count in Counter(axis.key for axis in self.axes).items() if count > 1]:
            raise ConfigError("search.over", f"has {twice[0]} twice")
        self.only_with = {axis: self._options_with(axis) for axis in self.axes}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(
            storage=f"sqlite:///{self.out / STUDY}", study_name="mdcs", load_if_exists=True
        )
        # With the same seed, the sampler of a continued study would repeat its proposals.
        seed = config.search.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=_STARTUP, constant_liar=self.at_once > 1
        )
        of, wanted = self.study.user_attrs.get("of"), [*sorted(given), *over]
        if of not in (None, wanted):
            raise ConfigError(self.key, f"{self.out} has a study of something else: {' '.join(of)}")
        self.study.set_user_attr("of", wanted)

    def run(self) -> str:
        """Run trials until there are enough. Return the reason if none has ended well, else "".

        Raises ConfigError if another search runs in the folder.
        """
        try:
            with claim(self.out):
                return self._run()
        except Occupied as error:
            raise ConfigError(self.key, str(error)) from error

    def _run(self) -> str:
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):  # left by a search that was killed
            self.study.tell(trial.number, state=TrialState.FAIL)
        while (missing := self.trials - len(self._ended())) > 0:
            self._try([self.study.ask() for _ in range(min(missing, self.at_once))])
        trials = self._ended()
        show(trials)
        return "" if any(trial.state == TrialState.COMPLETE for trial in trials) else "all trials were pruned"

    def _ended(self) -> list[FrozenTrial]:
        return self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _try(self, trials: Sequence[Trial]) -> None:
        """Measure these trials, all at once if they are submitted. Those without a step time are pruned, with the
        reason."""
        ready: dict[Path, tuple[Trial, Config]] = {}
        for trial in trials:
            try:
                overrides = self._overrides(trial)
                trial.set_user_attr("overrides", overrides)
                config = self.compose([*self.given, *overrides])
                config.run.name = config.run.name or f"trial {trial.number}"
                ready[self.out / "runs" / str(trial.number)] = trial, config
            except ConfigError as error:
                self._end(trial, None, str(error))
        for folder, reason in self._run_all({folder: config for folder, (_, config) in ready.items()}):
            trial, (step_s, why) = ready[folder][0], (None, reason) if reason else _measured(folder, ready[folder][0])
            self._end(trial, step_s, why)

    def _run_all(self, configs: Mapping[Path, Config]) -> Iterable[tuple[Path, str]]:
        """Run these jobs. Yield (folder, reason of the failure), with an empty reason for a job that has ended well."""
        if self.submits is not None:
            yield from run_submitted(configs, self.submits, self.out).items()
            return
        for folder, config in configs.items():
            try:
                yield folder, jobs.run(config, folder, self.console, known=self.known).reason
            except ConfigError as error:
                yield folder, str(error)

    def _end(self, trial: Trial, step_s: float | None, reason: str) -> None:
        if step_s is None:
            trial.set_user_attr("reason", reason)
        self.study.tell(trial, step_s, TrialState.PRUNED if step_s is None else TrialState.COMPLETE)
        ended = f"pruned: {reason}" if step_s is None else f"{step_s * 1e3:.1f} ms"
        text = f"trial {trial.number}: {' '.join(trial.user_attrs.get('overrides', []))}: {ended}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self.study.trials_dataframe().to_csv(self.out / TABLE, index=False)

    def _options_with(self, axis: Axis) -> set[str] | None:
        """The searched options of the axis' group that have its key; None where the group is not searched.

        Raises ConfigError for a key that none of the options has, and for a value that is not allowed.
        """
        chosen = next((each.choices for each in self.axes if each.key == axis.group), None)
        found, wrong = set(), None
        for choice in chosen or ("",):
            try:
                option = [f"{axis.group}={choice}"] if choice and axis.key != axis.group else []
                for value in axis.ends:
                    self.compose([*self.given, *option, f"{axis.key}={value}"])
                found.add(choice)
            except ConfigError as error:
                wrong = error
        if wrong is not None and not found:
            raise wrong
        return None if chosen is None or axis.key == axis.group else found

    def _overrides(self, trial: Trial) -> list[str]:
        """Optuna's proposal as overrides, without keys that the chosen option does not have."""
        made: dict[str, str] = {}
        for axis in sorted(self.axes, key=lambda axis: axis.key.count(".")):
            only_with = self.only_with[axis]
            if only_with is None or made[axis.group].partition("=")[2] in only_with:
                made[axis.key] = axis.suggest(trial)
        return list(made.values())


def _measured(folder: Path, trial: Trial) -> tuple[float | None, str]:
    """The median step in seconds; None, with the reason, for a peak above the budget."""
    row = load_run(folder).row()
    trial.set_user_attr("predicted_s", row["predicted_step_s"])
    if row["fits"] is False:
        return (
            None,
            f"peak of {row['peak_bytes'] / MIB:.1f} MiB, over the budget of {row['budget_bytes'] / MIB:.1f} MiB",
        )
    return float(row["step_s"]), ""


def show(trials: Sequence[FrozenTrial]) -> None:
    """Print a row per trial, the fastest first and pruned trials last."""
    rows = []
    for trial in sorted(trials, key=lambda trial: math.inf if trial.value is None else trial.value):
        told = trial.user_attrs
        what = " ".join(told.get("overrides", [])) + (f": {told['reason']}" if "reason" in told else "")
        rows.append([str(trial.number), milliseconds(trial.value), milliseconds(told.get("predicted_s")), what])
    headings = "trial", "step ms", "predicted ms", "what"
    table = new_table("trials, the fastest first", headings, left=("what",), rows=rows)
    new_console(highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
