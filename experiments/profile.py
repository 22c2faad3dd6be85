"""Measure the profile that a job is planned with, and show it: units, link, interference.

    mdcs profile model=gpt2-small link=emulated link.rate_gbit=10
    mdcs profile model=gpt2-small profile.refresh=true

The command line is that of `mdcs train`. A profile that an equal job has measured is shown again, unless
`profile.refresh=true` measures anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from rich.console import Console
from rich.table import Table

from analysis.table import new_console, new_table
from experiments.config.schema import Config
from experiments.job import app
from experiments.job import run as jobs
from experiments.job.profiles import calibration_errors, ranks
from mdcs.profile.link import operation_name
from mdcs.profile.schema import Profile, Unit
from mdcs.sizes import MIB


def main() -> int:
    console = new_console()

    def measure(config: Config, folder: Path) -> str:
        if reason := jobs.prepare("profile", config, folder, console):
            return reason
        show(Profile.from_json((folder / "profile.json").read_text(encoding="utf-8")), console)
        console.print(f"the profile is {folder / 'profile.json'}", markup=False, highlight=False, soft_wrap=True)
        return ""

    return app.Program(measure).run()


def show(profile: Profile, console: Console) -> None:
    for table in (units_table(profile), link_table(profile), interference_table(profile)):
        console.print(table)
    if line := calibration_errors(profile):
        console.print(line, highlight=False, soft_wrap=True)


def units_table(profile: Profile) -> Table:
    """A row per unit: its bytes, the times of its slots with their spread, its shard's update, its kept activations."""
    rows = [
        [unit.name, f"{unit.numel * profile.layouts[index].param_width / 1e6:.2f}",
         *(_slots(profile, index, phase) for phase in ("F", "B")), _update(profile, unit),
         f"{_kept(profile, index) / MIB:.2f}"]
        for index, unit in enumerate(profile.units)
    ]  # fmt: skip
    headings = ("unit", "MB", "forward ms", "backward ms", "update ms", "kept MiB")
    title = f"{ranks(profile)}; medians, with the 10th and the 90th percentile"
    return new_table(title, headings, left=("unit",), rows=rows)


def link_table(profile: Profile) -> Table:
    """A row per collective kind: latency, gap and rate with their standard errors, and a block's share of the rate."""
    link = profile.link
    kind = "emulated link" if link.emulated else "link"
    if shaped := profile.about.get("shaped_link"):
        kind = f"link shaped to {shaped} ({profile.about['congestion_control']})"
    about = f"{kind}: {link.depth} messages in flight, blocks of {profile.block / MIB:.2f} MiB"
    headings = ("collective", "α µs", "gap µs", "Gbit/s", "a block's share of the rate")
    table = new_table(about, headings, left=("collective",))
    for kind in link.kinds:
        alpha, beta, gap = link.alpha_of(kind), link.beta_of(kind), link.gap_of(kind)
        served, before = beta * profile.block, gap if link.depth > 1 else max(alpha, gap)
        operation = operation_name(kind)
        rate = f"{8e-9 / beta:.2f}{_error(profile, f'beta of {operation}', 8e-9 / beta**2)}" if beta else "∞"
        share = f"{served / (before + served):.0%}" if before + served else "–"
        table.add_row(
            str(kind), f"{alpha * 1e6:.1f}{_error(profile, f'alpha of {operation}', 1e6)}",
            f"{gap * 1e6:.1f}{_error(profile, f'gap of {operation}', 1e6)}", rate, share,
        )  # fmt: skip
    return table


def _error(profile: Profile, cost: str, scale: float) -> str:
    """The standard error of a cost, times ``scale``; a cost that was not measured is assumed, or given."""
    return f" ± {scale * profile.errors[cost]:.2g}" if cost in profile.errors else ""


def interference_table(profile: Profile) -> Table:
    """The costs that messages and computing have for each other, with their standard errors."""
    costs = (
        ("computing loses per message", "compute_per_message", 1e6, "µs"),
        ("computing loses per MB sent", "compute_per_byte", 1e9, "ms"),
        ("computing loses of copying, summing and updating", "compute_per_work", 1e2, "%"),
        ("a message beside computing takes at least", "message_seconds", 1e6, "µs"),
        ("and per MB", "seconds_per_byte", 1e9, "ms"),
        ("a message that finds the link idle waits for the last rank", "skew_seconds", 1e6, "µs"),
        ("computing that waits for a message goes on later by", "dispatch_seconds", 1e6, "µs"),
        ("between backward and forward the loop takes", "turn_seconds", 1e3, "ms"),
    )
    rows = [["computing is slower while a message is in flight by", f"{profile.interference:.0%}"]]
    for what, name, scale, unit in costs:
        error = f"± {scale * profile.errors[name]:.2g}" if name in profile.errors else "(assumed)"
        value = scale * getattr(profile.contention, name)
        rows.append([what, f"{value:.0f} {unit} {error}" if value >= 100 else f"{value:.3g} {unit} {error}"])
    return new_table("computing and communicating at the same time", ("what", "value"), left=("what",), rows=rows)


def _slots(profile: Profile, unit: int, phase: str) -> str:
    own = [i for i, slot in enumerate(profile.slots) if (slot.unit, slot.phase) == (unit, phase)]
    if not own:
        return "–"
    shown = f"{sum(profile.slots[i].seconds for i in own) * 1e3:.1f}"
    spreads = [profile.spread[name] for name in (f"slot {i}" for i in own) if name in profile.spread]
    if len(spreads) < len(own):  # calculated, or written by hand
        return shown
    low, high = (sum(s) * 1e3 for s in zip(*spreads, strict=True))
    return f"{shown} ({low:.1f}, {high:.1f})"


def _update(profile: Profile, unit: Unit) -> str:
    if not unit.trainable:
        return "–"
    of, shard = profile.optimizers[unit.optimizer], unit.numel / profile.world
    seconds = shard * of.seconds_per_element + len(unit.segments) * of.seconds_per_run
    return f"{seconds * 1e3:.2f}"


def _kept(profile: Profile, unit: int) -> int:
    """Activation bytes that the unit's forward slots keep for its backward."""
    pairs = zip(profile.slots, profile.slots[1:], strict=False)
    return sum(after.live - slot.live for slot, after in pairs if (slot.unit, slot.phase) == (unit, "F"))


if __name__ == "__main__":
    sys.exit(main())
