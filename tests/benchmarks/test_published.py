"""Published runs predicted: the page is what the command writes, and says why its worst predictions are bad."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import benchmarks
from benchmarks import published
from benchmarks.published import steps_of
from benchmarks.published_runs import calibrated, predict, read

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def groups():
    return [(group, group.predictions()) for group in read()]


def test_the_pages_are_what_the_script_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["published", "--out", str(tmp_path)])
    published.main()
    name = "dev/published-runs.md"
    assert (tmp_path / name).read_text() == (DOCS / name).read_text(), "make published writes another page"
    assert benchmarks.part(tmp_path, "published") == benchmarks.part(DOCS, "published") != ""


def test_the_smallest_run_takes_as_long_as_published(groups):
    for _, told in groups:
        if told[0].case.seconds:
            assert told[0].error == pytest.approx(0.0, abs=1e-4)


def test_no_run_is_judged_by_what_was_taken_from_it():
    """Other published figures of all runs but those that are taken change no prediction."""
    for group in read()[:5]:
        taken, judged = group.runs[: group.judged], group.runs[group.judged :]
        changed = replace(group, runs=(*taken, *(replace(case, seconds=9.0, gib=1.0) for case in judged)))
        assert [each.step_s for each in changed.predictions()] == [each.step_s for each in group.predictions()]


def test_every_step_beyond_its_mark_has_a_reason(groups):
    beyond = [each.case for each, _ in steps_of(groups) if abs(each.error) > each.case.mark]
    assert beyond and [case for case in beyond if not case.why] == []


def test_most_steps_are_within_the_marks_and_more_than_without_a_model(groups):
    within = [(abs(each.error) <= each.case.mark, abs(hidden) <= each.case.mark) for each, hidden in steps_of(groups)]
    told, hidden = map(sum, zip(*within, strict=True))
    assert len(within) >= 75 and told > 0.75 * len(within) and told > hidden + 10


def test_memory_does_not_depend_on_how_fast_a_device_is():
    case = next(group.runs[0] for group in read() if group.runs[0].gib)
    rate = calibrated(case)
    assert predict(case, rate).reserved == predict(case, 2 * rate).reserved


def test_a_step_that_is_shorter_than_its_messages_has_no_rate():
    case = next(group.runs[0] for group in read() if group.runs[0].devices > 1)
    with pytest.raises(ValueError, match="no rate predicts a step of 1e-06 s"):
        calibrated(replace(case, seconds=1e-6))
