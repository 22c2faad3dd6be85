"""Display of a running job: a progress bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from launch import status
from launch.status import Status

_LINES = 6
"""Approximate number of progress lines of a job in a log."""
_STARTS = 8
"""Most lines about started ranks. With fewer ranks than this there is one line."""


class JobProgress:
    """Shows the phases before the first step of a job, then its steps, `steps` in all. A context manager."""

    def __init__(self, console: Console, name: str, steps: int) -> None:
        self._console, self._name, self._steps = console, name, steps
        self._phase, self._step = "", 0
        self._bar: Progress | None = None
        if console.is_terminal:
            words, shown = (TextColumn(f"{{task.{each}}}", markup=False) for each in ("description", "fields[shown]"))
            columns = (SpinnerColumn(), words, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), shown)
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task(name, total=steps, shown="starting")

    def __enter__(self) -> JobProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def statuses(self, statuses: Sequence[Status | None]) -> None:
        """Show the phase of rank 0 until the first step. Of many ranks that start, show how many have."""
        told = [said for said in statuses if said is not None]
        if self._step or not told or any(said.step for said in told):
            return
        first, ranks = statuses[0], len(statuses)
        phase = first.phase if first is not None else status.STARTING
        if phase in (status.STARTING, status.JOINING):
            started, phase = sum(said.phase != status.STARTING for said in told), status.STARTING
            if self._bar is None:  # a line for each further eighth
                started = started * _STARTS // ranks * ranks // _STARTS
            if ranks >= _STARTS and started:
                phase = f"starting: {started} of {ranks} ranks have started"
        if phase == self._phase:
            return
        self._phase = phase
        if self._bar is not None:
            self._bar.update(self._task, shown=phase)
        else:
            self._line(phase)

    def event(self, event: Mapping[str, Any]) -> None:
        """Show a step; of the plan the solver's outcome, and what recomputation frees and costs."""
        for said in ("outcome", "recomputation") if event.get("event") == "start" else ():
            if event.get(said):
                self._line(f"plan: {event[said]}")
        if event.get("event") != "step":
            return
        self._step = int(event["step"])
        shown = describe(event)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._step, shown=shown)
        elif self._step in (1, self._steps) or self._step % max(1, self._steps // _LINES) == 0:
            self._line(f"step {self._step}/{self._steps} {shown}")

    def _line(self, text: str) -> None:
        self._console.print(f"{self._name}: {text}", markup=False, highlight=False, soft_wrap=True)


def describe(step: Mapping[str, Any]) -> str:
    """Describe a step event in a few words, with the plan that it measured; missing values are left out."""
    parts = [step["plan"]] if "plan" in step else []
    if (loss := step.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (seconds := step.get("step_s")) is not None:
        parts.append(f"{seconds * 1e3:.0f} ms")
    for word in ("stalled", "exposed"):
        if (seconds := step.get(f"{word}_s")) is not None:
            parts.append(f"{word} {seconds * 1e3:.0f} ms")
    if (ratio := step.get("overlap_ratio")) is not None:
        parts.append(f"overlap {ratio:.0%}")
    return ", ".join([*parts, *step.get("departures", ())])
