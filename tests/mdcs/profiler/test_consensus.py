"""Ranks agree: on one profile, on rank 0's plan, and on its error, whatever it is."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import os
import re
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from mdcs import InfeasibleBudget, Job
from mdcs.api.offline import autoprofile
from mdcs.model.units import ByLeaf, UnsupportedModel, partition
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.plan.schedule import Message
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile
from mdcs.profiler import consensus
from mdcs.profiler.consensus import Progress, all_gather_object, on_all_ranks, on_rank_zero, phase
from mdcs.profiler.merging import merge_profiles
from mdcs.runtime.errors import RunError

from ..profiles import chain
from ..runtime.ranks import Ranks


def test_a_unit_is_in_use_where_it_is_on_any_rank(two: Ranks) -> None:
    for agreed in two.run(agree_on_uses):
        assert [(u.forward, u.backward, u.aliased, bool(u.gradients)) for u in agreed.units[:2]] == [
            ((0, 2), (1, 2), True, False), ((1, 1), (1, 1), False, True),
        ]  # fmt: skip


def agree_on_uses() -> Profile:
    profile = chain(100, 100, 100)
    units = [replace(u, gradients=((100, 0.5),)) for u in profile.units]
    if dist.get_rank() == 1:
        units[0] = replace(units[0], forward=(0, 2), backward=(1, 2), gradients=(), aliased=True)
    return merge_profiles(replace(profile, units=tuple(units)))


class Odd(Exception):
    """Cannot be made again from what pickle keeps."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}: {why}")


def a_plan() -> Plan:
    return Plan(Job(chain(100)), (Strategy.dp,), ((100,),), (Message(Kind.AR, ((0, 0),), 1),))


def raised(what: str) -> Exception:
    if what == "local":

        class Local(Exception):
            """Has no name by which pickle could find it."""

        return Local("mine")
    errors = {
        "KeyError": KeyError("scheduler"),
        "InfeasibleBudget": InfeasibleBudget(10, 20, "even all fsdp"),
        "Odd": Odd("solver", "gone"),
    }
    return errors[what]


def plan_or_error(what: str) -> tuple[Plan, bool]:
    called = []

    def make() -> Plan:
        called.append(dist.get_rank())
        if what:
            raise raised(what)
        return a_plan()

    plan = on_rank_zero(make)
    return plan, called == ([0] if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("what", ["KeyError", "InfeasibleBudget"])
def test_rank_zeros_error_is_every_ranks(two: Ranks, what: str) -> None:
    first, second = two.outcomes(plan_or_error, what, timeout_s=20)
    assert first.kind == second.kind == what
    assert first.message == second.message == str(raised(what))


@pytest.mark.parametrize(("what", "kind"), [("Odd", "Odd"), ("local", "Local")])
def test_an_error_that_cannot_be_sent_is_its_text_elsewhere(two: Ranks, what: str, kind: str) -> None:
    first, second = two.outcomes(plan_or_error, what, timeout_s=20)
    assert (first.kind, first.message) == (kind, str(raised(what)))
    assert (second.kind, second.message) == ("RuntimeError", f"{kind}: {first.message}")


def test_rank_zeros_plan_is_every_ranks(two: Ranks) -> None:
    (first, once), (second, never) = two.run(plan_or_error, "")
    assert first == second and once and never


def test_without_ranks_a_plan_and_an_error_are_ones_own() -> None:
    plan = a_plan()
    assert on_rank_zero(lambda: plan) is plan
    with pytest.raises(KeyError, match="scheduler"):
        on_rank_zero(lambda: {}["scheduler"])


def of_this_rank() -> Profile:
    rank = dist.get_rank()
    profile = chain(100, 200, forward_s=0.1 + 0.2 * rank)
    slots = tuple(replace(slot, live=10 * rank, peak=30 - 10 * rank) for slot in profile.slots)
    return merge_profiles(replace(profile, slots=slots, spread={"slot 0": (0.1 + rank, 0.2 + rank)}))


def test_a_profile_has_median_times_the_most_bytes_and_the_spread_over_all(two: Ranks) -> None:
    first, second = two.run(of_this_rank)
    assert first == second
    assert first.slots[0].seconds == pytest.approx(0.2)
    assert (first.slots[0].live, first.slots[0].peak) == (10, 30)
    assert first.spread == {"slot 0": (0.1, 1.2)}


def of_another_branch() -> Profile:
    """Rank 0 leaves unit 1 out, which gets slots of no time at the end of both passes."""
    profile = chain(100, 200, 300)
    if dist.get_rank() == 0:
        f0, f1, f2, b2, b1, b0 = profile.slots
        left_out = [replace(slot, seconds=0.0, live=0, peak=7) for slot in (f1, b1)]
        profile = replace(profile, slots=(f0, f2, left_out[0], b2, b0, left_out[1]), spread={"slot 0": (1.0, 2.0)})
    else:
        profile = replace(profile, spread={f"slot {i}": (1.0, 2.0) for i in range(6)})
    return merge_profiles(profile)


def test_of_ranks_that_took_different_branches_the_profile_is_that_of_most_slots(two: Ranks) -> None:
    whole = chain(100, 200, 300)
    for found in two.run(of_another_branch):
        assert [(s.unit, s.phase) for s in found.slots] == [(s.unit, s.phase) for s in whole.slots]
        assert found.slots[1].seconds == whole.slots[1].seconds / 2 and found.slots[1].peak == max(7, whole.slots[1].peak)
        assert found.slots[0] == whole.slots[0] and found.units == whole.units and len(found.spread) == 6


# ---- what one rank raises alone


def alone(what: str) -> str:
    """Rank 1 leaves while all measure; then both go on with the loop's own group. What the others heard."""
    heard = ""
    try:
        with on_all_ranks():
            phase("measuring the model")
            if dist.get_rank() == 1:
                if what == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise KeyboardInterrupt if what == "interrupted" else UnsupportedModel("experts.1: gets no gradient")
            all_gather_object("mine")
    except (RunError, UnsupportedModel, KeyboardInterrupt) as e:
        heard = f"{type(e).__name__}: {e}"
    if what != "killed":
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
    return heard


@pytest.mark.parametrize(
    ("what", "said"), [("refused", "UnsupportedModel: experts.1: gets no gradient"), ("interrupted", "KeyboardInterrupt: ")]
)
def test_what_one_rank_raises_alone_the_others_hear_and_all_can_go_on(two: Ranks, what: str, said: str) -> None:
    first, second = two.run(alone, what, timeout_s=30)  # no process group gives up in that time
    assert second == said
    left = "rank 0, while measuring the model: rank 1 left while measuring the model"
    assert first == f"RunError: {left}: {said.strip()}"


def test_a_rank_that_is_killed_is_named() -> None:
    ranks = Ranks(3)  # of their own: one does not survive
    try:
        first, second, third = ranks.outcomes(alone, "killed", timeout_s=40)
    finally:
        ranks.stop()
    assert second.exit_code == -signal.SIGKILL
    for survivor in (first, third):
        assert survivor.value.startswith("RunError: rank ")
        assert survivor.value.endswith("(rank 1 is gone: killed, or cut off from the network)")


def told(tells: bool) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as written, on_all_ranks(tells=tells):
        phase("measuring the link")
        phase("planning")
    return re.sub(r"[0-9]+ s", "0 s", written.getvalue())


def test_rank_zero_tells_what_is_done_if_that_is_wanted(two: Ranks) -> None:
    assert two.run(told, True) == ["mdcs: measuring the link (after 0 s)\nmdcs: planning (after 0 s)\n", ""]
    assert two.run(told, False) == ["", ""]


def calibrated(rank: int) -> None:
    """The forward pass of ``rank`` raises in the third step of a profile."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    units = partition(model, ByLeaf())
    optimizer = torch.optim.Adam(model.parameters())
    calls = itertools.count()

    def step() -> torch.Tensor:
        if next(calls) == 2 and dist.get_rank() == rank:
            raise IndexError("no such token")
        loss: torch.Tensor = model(torch.ones(2, 8)).sum()
        return loss

    autoprofile(model, optimizer, units, step)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_calibration_run_is_heard_in_its_words(two: Ranks, rank: int) -> None:
    outcomes = two.outcomes(calibrated, rank, timeout_s=40)  # less than a message waits
    own, other = outcomes[rank], outcomes[1 - rank]
    assert (own.kind, own.message) == ("IndexError", "no such token")
    assert other.kind == "RunError"
    assert re.search(rf"rank {rank} left the run in step \d: IndexError: no such token", other.message)


# ---- progress: a line per phase with its time budget, and a bar on a terminal alone


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr(consensus, "_REDRAWN_S", 0.001)
    bar = Progress()
    bar.begin("measuring the link", 3.2)
    until = time.monotonic() + 60  # against a hang only
    while isinstance(stream, Terminal) and "[" not in stream.getvalue() and time.monotonic() < until:
        time.sleep(0.001)
    bar.begin("planning", None)
    bar.end()
    return re.sub(r"after \d+ s", "after 0 s", stream.getvalue())


def test_a_phase_is_a_line_with_its_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "mdcs: measuring the link, about 3 s (after 0 s)\nmdcs: planning (after 0 s)\n"
    assert shown(monkeypatch, io.StringIO()) == lines


def test_a_program_that_configures_logging_has_the_lines_in_its_log(caplog, capsys) -> None:
    caplog.set_level(logging.INFO)
    bar = Progress()
    bar.begin("planning", None)
    bar.end()
    assert caplog.record_tuples == [("mdcs.profiler.consensus", logging.INFO, "planning (after 0 s)")]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_the_next_line_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    written = shown(monkeypatch, Terminal())
    assert re.search(r"\rmdcs: \[#*\.+\]", written)
    assert re.search(r"\]\r\x1b\[Kmdcs: planning", written)
