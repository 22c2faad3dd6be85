"""Progress: a few lines in a log, a bar on a terminal."""

import io

from rich.console import Console

from experiments.job.run import JobProgress
from launch.status import Status


def said(step: int, phase: str) -> list[Status | None]:
    return [Status(rank=0, pid=1, step=step, phase=phase, time=0.0), None]


def shown(steps: int, *, terminal: bool) -> str:
    file = io.StringIO()
    with JobProgress(Console(file=file, force_terminal=terminal, width=100), "a job", steps) as progress:
        progress.statuses([None, None])
        for phase in ("profiling", "profiling", "planning"):
            progress.statuses(said(0, phase))
        for step in range(1, steps + 1):
            progress.event({"event": "step", "step": step, "loss": 0.5, "step_s": 0.1})
            progress.statuses(said(step, "forward"))
        progress.event({"event": "summary"})
    return file.getvalue()


def test_a_log_gets_each_phase_once_and_a_few_steps():
    lines = shown(100, terminal=False).splitlines()
    assert lines[:3] == ["a job: profiling", "a job: planning", "a job: step 1/100 loss 0.5000, 100 ms"]
    assert lines[-1] == "a job: step 100/100 loss 0.5000, 100 ms"
    assert len(lines) < 12


def test_what_recomputation_frees_and_costs_is_said_once():
    file = io.StringIO()
    with JobProgress(Console(file=file, width=100), "a job", 1) as progress:
        progress.event({"event": "start", "outcome": "", "recomputation": "2 of 3 units recompute"})
        progress.event({"event": "step", "step": 1, "loss": 0.5, "step_s": 0.1})
    assert file.getvalue().splitlines()[0] == "a job: plan: 2 of 3 units recompute"


def test_a_terminal_gets_a_bar():
    assert "100/100" in shown(100, terminal=True)


def test_of_many_ranks_a_log_says_how_many_have_started():
    """A line for each further eighth, whichever ranks are first; of few ranks that they start."""
    file = io.StringIO()

    def ranks(count: int, *phases: str) -> list[Status | None]:
        told = [Status(rank=rank, pid=1, step=0, phase=phase, time=0.0) for rank, phase in enumerate(phases)]
        return [*[None] * (count - len(told)), *told]  # the first ones are the last to start

    with JobProgress(Console(file=file, force_terminal=False, width=100), "a job", 1) as progress:
        progress.statuses(ranks(64))
        for started in range(64):
            progress.statuses(ranks(64, *["joining"] * started, "starting"))
        progress.statuses(ranks(64, *["joining"] * 64))
        progress.statuses(ranks(64, *["profiling"] * 64))
    lines = file.getvalue().splitlines()
    counts = [f"a job: starting: {count} of 64 ranks have started" for count in range(8, 65, 8)]
    assert lines == ["a job: starting", *counts, "a job: profiling"]

    file.truncate(0)
    with JobProgress(Console(file=file, force_terminal=False, width=100), "a job", 1) as progress:
        for phases in (("starting", "starting"), ("joining", "starting"), ("joining", "joining"), ("profiling", "joining")):
            progress.statuses(ranks(2, *phases))
    assert file.getvalue().lstrip("\0").splitlines() == ["a job: starting", "a job: profiling"]
