"""How well step times are predicted: runs on the emulated link, each beside the replay of its plan.

    python experiments/accuracy.py [--models gpt2 bert resnet] [--ranks 2 3] [override …]

The rate of the link is set so that the communication of all-zero1 takes 0.5, 1 and 3 × as long as computing. Strategies
and schedulers take turns. The error is (predicted - measured) / measured of the median step.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra import compose, initialize_config_dir
from rich.console import Console
from rich.table import Table

from analysis import load_run
from experiments import config, jobs
from experiments.profiles import Profiles
from mdcs.profile import Profile

CONF = Path(__file__).resolve().parent.parent / "conf"
MODELS = {
    "gpt2": "model=gpt2-tiny data=stdlib_bytes model.layers=6 model.width=192 model.sequence=128 data.batch_size=4",
    "bert": "model=bert-tiny data=stdlib_bytes model.layers=6 model.width=192 model.sequence=128 data.batch_size=4",
    "resnet": "model=resnet-tiny data=digits model.depths=[2,2,2,2] data.batch_size=32",
}
RATIOS = (0.5, 1.0, 3.0)
PLANS = (
    "strategy=zero1 scheduler=dear",
    "strategy=fsdp scheduler=wfbp",
    "strategy=greedy scheduler=priority budget=over_floor budget.over_floor=0.2",
    "strategy=joint budget=over_floor budget.over_floor=0.2",
    "strategy=dp scheduler=wfbp",
    "strategy=sdp scheduler=partitioning",
    "strategy=fsdp scheduler=sequential",
    "strategy=greedy scheduler=memory_aware budget=over_floor budget.over_floor=0.2",
)
PER_RATIO = 2  # plans, the next in turn
STEPS = "run.steps=18 run.warmup_steps=5"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python experiments/accuracy.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("overrides", nargs="*", help="config overrides for all, e.g. run.steps=30")
    arguments = parser.parse_args()
    console, turn, share = Console(stderr=True), itertools.cycle(PLANS), Profiles()
    rows: list[tuple[str, int, float, dict[str, Any]]] = []
    config.register()
    with tempfile.TemporaryDirectory(prefix="mdcs-accuracy-") as folder, initialize_config_dir(str(CONF), version_base=None):
        for model, ranks in itertools.product(arguments.models, arguments.ranks):
            common = f"{MODELS[model]} cluster.ranks={ranks} {STEPS} profile.refresh=true".split() + arguments.overrides
            first = Path(folder) / f"{model}-{ranks}"
            if not run(first, [*common, "strategy=zero1", "link=emulated"], console, share, only="profile"):
                return 1
            profile = Profile.from_json((first / "profile.json").read_text(encoding="utf-8"))
            for ratio in RATIOS:
                link = ["link=emulated", f"link.rate_gbit={rate_gbit(profile, ratio):.4g}"]
                for plan in itertools.islice(turn, PER_RATIO):
                    path = Path(folder) / f"{model}-{ranks}-{len(rows)}"
                    if not run(path, [*common, *link, *plan.split()], console, share):
                        return 1
                    rows.append((model, ranks, ratio, load_run(path).row()))
    show(rows)
    return 0


def run(folder: Path, overrides: list[str], console: Console, share: Profiles, only: str | None = None) -> bool:
    outcome = jobs.run(config.from_composed(compose("config", overrides)), folder, console, share=share, only=only)
    if not outcome.ok:
        console.print(f"{' '.join(overrides)}: {outcome.reason}", markup=False)
    return outcome.ok


def rate_gbit(profile: Profile, ratio: float) -> float:
    """The rate at which a reduce-scatter and an all-gather of the whole model take ``ratio`` × the compute time."""
    size = sum(u.numel for u in profile.units) * (profile.param_bytes + profile.grad_bytes)
    sent = size * (profile.world - 1) / profile.world
    return sent * 8e-9 / (ratio * sum(slot.seconds for slot in profile.slots))


def show(rows: list[tuple[str, int, float, dict[str, Any]]]) -> None:
    table = Table(title="step time by replay and as measured, emulated link")
    for heading in ("model", "ranks", "comm. / comp.", "strategy", "scheduler", "predicted ms", "measured ms", "error"):
        table.add_column(heading, justify="left" if heading in ("model", "strategy", "scheduler") else "right")
    errors = []
    for model, ranks, ratio, row in rows:
        predicted, measured = row["predicted_step_s"], row["step_s"]
        errors.append(predicted / measured - 1)
        table.add_row(
            model, str(ranks), f"{ratio:g}", row["strategy"], row["scheduler"], f"{predicted * 1e3:.1f}",
            f"{measured * 1e3:.1f}", f"{errors[-1]:+.1%}",
        )  # fmt: skip
    console = Console(width=110)
    console.print(table)
    sizes = [abs(e) for e in errors]
    console.print(f"{len(sizes)} runs: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")


if __name__ == "__main__":
    sys.exit(main())
