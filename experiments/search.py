"""Search for the plan with the least measured step time, within the budget, by training a few steps at a time.

    mdcs search experiment=search_timed --trials 20
    mdcs search --trials 40 --search=scheduler=fusion,priority --search=scheduler.bucket_mib=1..64 …

Optuna proposes settings, and a job measures them. By default the search covers the fusion bytes of `scheduler=fusion`,
the block bytes of `scheduler=priority`, `budget.schedule_share` where there is a budget, and `link.depth`. `--search`
names other keys instead, each with LOW..HIGH (whole numbers if both are; logarithmic from a factor of ten on) or a list
of values. A key of an option is searched only where that option is chosen: `scheduler.bucket_mib` belongs to fusion. A
trial is pruned, with the reason, if it cannot be planned or run, or if its measured peak exceeds the budget. `--out`
has the study (study.db), trials.csv and the runs. The same command continues the study until it has `--trials` trials.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState
from rich.console import Console

from analysis import load_run
from analysis.table import milliseconds, new_console, new_table
from experiments.config.checks import compose_config, positive, run_composing
from experiments.config.schema import Config, ConfigError
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.profiles import Profiles
from launch.claim import Occupied, claim
from mdcs.sizes import MIB

DEFAULT = ("scheduler=fusion,priority", "scheduler.bucket_mib=0.25..64", "scheduler.block_mib=0.0625..8", "link.depth=1..4")
SHARE = "budget.schedule_share=0.0..1.0"  # added if there is a budget to divide
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
        key, _, values = text.partition("=")
        try:
            if ".." not in values:
                if key and (choices := tuple(each for each in values.split(",") if each)):
                    return cls(key, choices=choices)
            else:
                low, high = (float(each) if "." in each or "e" in each else int(each) for each in values.split("..", 1))
                if key and low < high and math.isfinite(high - low):
                    return cls(key, low, high)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"an axis is KEY=LOW..HIGH or KEY=VALUE,VALUE; got {text}")

    @property
    def group(self) -> str:
        return self.key.partition(".")[0]

    @property
    def first(self) -> str:
        """One of the values."""
        return self.choices[0] if self.choices else str(self.low)

    def __str__(self) -> str:
        return f"{self.key}={','.join(self.choices) or f'{self.low:g}..{self.high:g}'}"

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
    parser = argparse.ArgumentParser(prog="mdcs search", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=positive, default=20, help="in all, those of earlier calls included")
    parser.add_argument("--search", type=Axis.parse, action="append", default=[], metavar="KEY=…", help="an axis; again for more")
    parser.add_argument("--seed", type=int, default=0, help="seed of Optuna's sampler")
    parser.add_argument("--out", type=Path, default=Path("results/search"), help="the folder of the study")
    parser.add_argument("overrides", nargs="*", help="config overrides for all trials, e.g. model=gpt2-tiny")
    arguments = parser.parse_intermixed_args()
    try:
        return app.on_rank_zero(lambda: run_composing(lambda: Search(arguments, module).run()))
    except KeyboardInterrupt:
        print("interrupted: all ranks were ended; the same command goes on", file=sys.stderr)
        return 130


class Search:
    """One study. Raises ConfigError before anything is started."""

    def __init__(self, asked: argparse.Namespace, module: str) -> None:
        self.asked, self.module, self.out = asked, module, asked.out.resolve()
        self.console, self.known = Console(stderr=True), Profiles()
        config = compose_config(asked.overrides)
        has_budget = config.budget.gib is not None or config.budget.over_floor is not None
        self.axes = asked.search or [Axis.parse(text) for text in (*DEFAULT, *([SHARE] if has_budget else []))]
        self.only_with = {axis: self._options_with(axis) for axis in self.axes}
        self.out.mkdir(parents=True, exist_ok=True)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.study = optuna.create_study(storage=f"sqlite:///{self.out / STUDY}", study_name="mdcs", load_if_exists=True)
        # With the same seed, the sampler of a continued study would repeat its proposals.
        self.study.sampler = optuna.samplers.TPESampler(seed=asked.seed + len(self.study.trials), n_startup_trials=_STARTUP)
        of, wanted = self.study.user_attrs.get("of"), [*sorted(asked.overrides), *map(str, self.axes)]
        if of not in (None, wanted):
            raise ConfigError("--out", f"{self.out} has a study of something else: {' '.join(of)}")
        self.study.set_user_attr("of", wanted)

    def run(self) -> int:
        """Run trials until there are enough. Return 1 if none has ended well, else 0.

        Raises ConfigError if another search runs in the folder.
        """
        try:
            with claim(self.out):
                return self._run()
        except Occupied as error:
            raise ConfigError("--out", str(error)) from error

    def _run(self) -> int:
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):  # left by a search that was killed
            self.study.tell(trial.number, state=TrialState.FAIL)
        while len(self._ended()) < self.asked.trials:
            self._try(self.study.ask())
            self.study.trials_dataframe().to_csv(self.out / TABLE, index=False)
        trials = self._ended()
        show(trials)
        return 0 if any(trial.state == TrialState.COMPLETE for trial in trials) else 1

    def _ended(self) -> list[FrozenTrial]:
        return self.study.get_trials(states=(TrialState.COMPLETE, TrialState.PRUNED))

    def _try(self, trial: Trial) -> None:
        try:
            overrides = self._overrides(trial)
            trial.set_user_attr("overrides", overrides)
            step_s = self._measure(trial, compose_config([*self.asked.overrides, *overrides]))
        except (ConfigError, Pruned) as why:
            trial.set_user_attr("reason", str(why))
            self.study.tell(trial, state=TrialState.PRUNED)
            self._say(f"trial {trial.number}: {' '.join(trial.user_attrs.get('overrides', []))}: pruned: {why}")
        else:
            self.study.tell(trial, step_s)
            self._say(f"trial {trial.number}: {' '.join(overrides)}: {step_s * 1e3:.1f} ms")

    def _options_with(self, axis: Axis) -> set[str] | None:
        """The searched options of the axis' group that have its key; None where the group is not searched.

        Raises ConfigError for a key that none of the options has, and for a value that is not allowed.
        """
        chosen = next((each.choices for each in self.axes if each.key == axis.group), None)
        found, wrong = set(), None
        for choice in chosen or ("",):
            try:
                option = [f"{axis.group}={choice}"] if choice and axis.key != axis.group else []
                compose_config([*self.asked.overrides, *option, f"{axis.key}={axis.first}"])
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
        """The median step in seconds. Raises Pruned for a job that fails, and for a peak above the budget."""
        folder = self.out / "runs" / str(trial.number)
        config.run.name = config.run.name or f"trial {trial.number}"
        outcome = jobs.run(config, folder, self.console, known=self.known, worker=self.module)
        if not outcome.ok:
            raise Pruned(outcome.reason)
        row = load_run(folder).row()
        trial.set_user_attr("predicted_s", row["predicted_step_s"])
        if row["fits"] is False:
            raise Pruned(f"peak of {row['peak_bytes'] / MIB:.1f} MiB, over the budget of {row['budget_bytes'] / MIB:.1f} MiB")
        return float(row["step_s"])

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class Pruned(Exception):
    """Raised for a trial without a step time. The message is the reason."""


def show(trials: Sequence[FrozenTrial]) -> None:
    """Print a row per trial, the fastest first and pruned trials last."""
    table = new_table("trials, the fastest first", ("trial", "step ms", "predicted ms", "what"), left=("what",))
    for trial in sorted(trials, key=lambda trial: math.inf if trial.value is None else trial.value):
        told = trial.user_attrs
        what = " ".join(told.get("overrides", [])) + (f": {told['reason']}" if "reason" in told else "")
        table.add_row(str(trial.number), milliseconds(trial.value), milliseconds(told.get("predicted_s")), what)
    console = new_console(highlight=False, markup=False)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
