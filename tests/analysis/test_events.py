"""The events of a run are read while they are written, and from whatever a crash has left."""

import pytest

from analysis.events import SCHEMA, Tail, last_attempt, read_events


def test_a_tail_gives_each_finished_line_once(tmp_path):
    path = tmp_path / "m"
    tail = Tail(path)
    assert tail.new() == []
    with path.open("w") as file:
        file.write('{"event": "step"}\n{"eve')
        file.flush()
        assert tail.new() == [{"event": "step"}]
        assert tail.new() == []
        file.write('nt": "eval"}\nnot json\n[3]\n{"step": 4}\n{"event": "summary"}\n')
        file.flush()
        assert tail.new() == [{"event": "eval"}, {"event": "summary"}]


def test_half_a_last_line_is_left_out_and_half_another_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step"}\n\n{"event": "st')
    assert read_events(path) == [{"event": "step"}]
    path.write_text('{"event": "step"}\n{"event": "st\n{"event": "failure"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not a JSON object with an event"):
        read_events(path)


def test_a_file_without_an_event_has_none(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_events(tmp_path / "metrics.jsonl") == last_attempt([]) == []
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "nowhere.jsonl")


def test_the_last_attempt_begins_with_its_job():
    job, start, step = {"event": "job", "schema": SCHEMA}, {"event": "start"}, {"event": "step", "step": 1}
    assert last_attempt([start, step, job, start, step, job]) == [job]
    assert last_attempt([job, start, step]) == [job, start, step]
