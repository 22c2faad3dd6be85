"""Search for the plan with the least measured step time, within the budget, by training a few steps at a time.

    mdcs search experiment=search_timed search.trials=20 hydra.run.dir=results/search
    mdcs search strategy=zero2 scheduler=fusion,priority 'scheduler.bucket_mib=interval(1,64)' 'link.depth=range(1,5)'

Optuna proposes settings, and a job measures them. Keys with several values are searched: a list, Hydra's range(…), or
interval(LOW,HIGH), which is logarithmic from a factor of ten on; int(interval(LOW,HIGH)) is of whole numbers. Without
any, the search covers the fusion bytes of `scheduler=fusion`, the block bytes of `scheduler=priority`, `budget.schedule_share`
where there is a budget, and `link.depth`. A key of an option is searched only where that option is chosen:
`scheduler.bucket_mib` belongs to fusion. A trial is pruned, with the reason, if it cannot be planned or run, or if its
measured peak exceeds the budget. The folder has the study (study.db), trials.csv and the runs. A search in the folder
of an earlier one continues its study until it has `search.trials` trials.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import optuna
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep
from hydra.errors import HydraException
from optuna import Study, TrialPruned
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from analysis import load_run
from analysis.table import milliseconds, new_console, new_table
from experiments.config.checks import compose_config
from experiments.config.schema import Config, ConfigError
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
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
                    raise ConfigError("search.over", f"interval(LOW,HIGH) needs finite numbers, LOW below HIGH; got {text}")
                return cls(key, low, high)
            elif key and override.is_sweep_override():
                return cls(key, choices=tuple(map(str, override.sweep_string_iterator())))
        except HydraException:
            pass
        raise ConfigError("search.over", f"an axis is KEY=VALUE,VALUE, KEY=range(…) or KEY=interval(LOW,HIGH); got {text}")

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


def main(module: str = jobs.WORKER) -> int:
    """Run the search of the command line. Return the exit code. The jobs' ranks run the module `module`."""
    axes = [argument for argument in sys.argv[1:] if _sweeps(argument)]
    if axes:
        rest = [argument for argument in sys.argv[1:] if argument not in axes]
        sys.argv[1:] = [*rest, f"search.over={json.dumps(axes)}"]

    def search(config: Config, folder: Path) -> str:
        given = [each for each in HydraConfig.get().overrides.task if not each.startswith("search.")]
        return Search(config, given, folder, module).run()

    return app.run(app.Program(search, own=("search",)))


def _sweeps(argument: str) -> bool:
    """Whether an argument is an override with several values."""
    if argument.startswith(("-", "hydra", "search.")) or "=" not in argument:
        return False
    try:
        return OverridesParser.create().parse_override(argument).is_sweep_override()
    except HydraException:  # which Hydra reports
        return False


class Search:
    """One study. Raises ConfigError before anything is started."""

    def __init__(self, config: Config, given: Sequence[str], out: Path, module: str) -> None:
        self.given, self.module, self.out, self.trials = given, module, out.resolve(), config.search.trials
        self.console, self.known = Console(stderr=True), Profiles()
        over = config.search.over or [*DEFAULT, *([SHARE] if config.budget.limited else [])]
        self.axes = [Axis.parse(text) for text in over]
        if twice := [key for key, count in Counter(axis.key for axis in self.axes).items() if count > 1]:
            raise ConfigError("search.over", f"has {twice[0]} twice")
        self.only_with = {axis: self._options_with(axis) for axis in self.axes}
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(storage=f"sqlite:///{self.out / STUDY}", study_name="mdcs", load_if_exists=True)
        # With the same seed, the sampler of a continued study would repeat its proposals.
        seed = config.search.seed + len(self.study.trials)
        self.study.sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=_STARTUP)
        of, wanted = self.study.user_attrs.get("of"), [*sorted(given), *over]
        if of not in (None, wanted):
            raise ConfigError("hydra.run.dir", f"{self.out} has a study of something else: {' '.join(of)}")
        self.study.set_user_attr("of", wanted)

    def run(self) -> str:
        """Run trials until there are enough. Return the reason if none has ended well, else "".

        Raises ConfigError if another search runs in the folder.
        """
        try:
            with claim(self.out):
                return self._run()
        except Occupied as error:
            raise ConfigError("hydra.run.dir", str(error)) from error

    def _run(self) -> str:
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):  # left by a search that was killed
            self.study.tell(trial.number, state=TrialState.FAIL)
        if (missing := self.trials - len(self._ended())) > 0:
            self.study.optimize(self._try, n_trials=missing, callbacks=[self._report])
        trials = self._ended()
        show(trials)
        return "" if any(trial.state == TrialState.COMPLETE for trial in trials) else "all trials were pruned"

    def _ended(self) -> list[FrozenTrial]:
        return self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _try(self, trial: Trial) -> float:
        """The median step in seconds. Raises TrialPruned, and keeps the reason."""
        try:
            overrides = self._overrides(trial)
            trial.set_user_attr("overrides", overrides)
            return self._measure(trial, compose_config([*self.given, *overrides]))
        except (ConfigError, TrialPruned) as why:
            trial.set_user_attr("reason", str(why))
            raise TrialPruned(str(why)) from why

    def _report(self, study: Study, trial: FrozenTrial) -> None:
        told = trial.user_attrs
        ended = f"{trial.value * 1e3:.1f} ms" if trial.value is not None else f"pruned: {told['reason']}"
        text = f"trial {trial.number}: {' '.join(told.get('overrides', []))}: {ended}"
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        study.trials_dataframe().to_csv(self.out / TABLE, index=False)

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
                    compose_config([*self.given, *option, f"{axis.key}={value}"])
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

    def _measure(self, trial: Trial, config: Config) -> float:
        """The median step in seconds. Raises TrialPruned for a job that fails, and for a peak above the budget."""
        folder = self.out / "runs" / str(trial.number)
        config.run.name = config.run.name or f"trial {trial.number}"
        outcome = jobs.run(config, folder, self.console, known=self.known, worker=self.module)
        if not outcome.ok:
            raise TrialPruned(outcome.reason)
        row = load_run(folder).row()
        trial.set_user_attr("predicted_s", row["predicted_step_s"])
        if row["fits"] is False:
            peak, budget = row["peak_bytes"] / MIB, row["budget_bytes"] / MIB
            raise TrialPruned(f"peak of {peak:.1f} MiB, over the budget of {budget:.1f} MiB")
        return float(row["step_s"])


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
