"""The record of where a rank is."""

import os
import time

from launch import status


def test_what_is_set_is_read(tmp_path):
    file = status.StatusFile(tmp_path, 3)
    assert status.read(tmp_path, 3).phase == "starting"
    file.set(step=7, phase="backward")
    file.set(phase="update")
    said = status.read(tmp_path, 3)
    assert (said.rank, said.pid, said.step, said.phase) == (3, os.getpid(), 7, "update")
    assert abs(said.time - time.time()) < 60


def test_nothing_is_read_before_something_was_said(tmp_path):
    assert status.read(tmp_path, 0) is None
    (tmp_path / "rank0.status").write_text("")
    assert status.read(tmp_path, 0) is None


def test_a_shorter_record_leaves_nothing_of_a_longer_one(tmp_path):
    file = status.StatusFile(tmp_path, 0)
    file.set(step=10**9, phase="x" * 1000)
    assert len(status.read(tmp_path, 0).phase) == 64
    file.set(phase="é" * 100)
    assert status.read(tmp_path, 0) is not None
    file.set(step=1, phase="y")
    assert (status.read(tmp_path, 0).step, status.read(tmp_path, 0).phase) == (1, "y")


def test_saying_where_one_is_costs_one_write_into_an_open_file(tmp_path, monkeypatch):
    file, written, write = status.StatusFile(tmp_path, 0), [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *arguments: written.append(write(*arguments)))
    monkeypatch.setattr(os, "open", None)
    for step in range(10):
        file.set(step=step)
    assert len(written) == 10 and len(set(written)) == 1


def test_outside_of_a_job_nothing_happens():
    status.set(step=1, phase="alone")
    assert status.current() is None


def test_work_is_progress_and_waiting_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "_WORKING_SECONDS", 0.2)
    monkeypatch.setattr(status, "_current", status.StatusFile(tmp_path, 0))

    def beats(work):
        before = status.read(tmp_path, 0)
        with status.working():
            work()
        return status.read(tmp_path, 0) != before

    def compute():
        until = time.process_time() + 0.5
        while time.process_time() < until:
            pass

    assert beats(compute) and not beats(lambda: time.sleep(1))
    assert beats(lambda: [((tmp_path / "download").write_bytes(bytes(100_000)), time.sleep(0.2)) for _ in range(4)])
