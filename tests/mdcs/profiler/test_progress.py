"""Progress on stderr: a line per phase with its time budget, and a bar on a terminal alone."""

from __future__ import annotations

import io
import logging
import re
import sys
import time

import pytest

from mdcs.profiler import progress
from mdcs.profiler.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, wanted: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr(progress, "_REDRAWN_S", 0.001)
    bar = Progress(wanted)
    bar.begin("measuring the link", 3.2)
    until = time.monotonic() + 60  # against a hang only
    while isinstance(stream, Terminal) and wanted and "[" not in stream.getvalue() and time.monotonic() < until:
        time.sleep(0.001)
    bar.begin("planning", None)
    bar.end()
    return re.sub(r"after \d+ s", "after 0 s", stream.getvalue())


def test_a_phase_is_a_line_with_its_time_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "mdcs: measuring the link, about 3 s (after 0 s)\nmdcs: planning (after 0 s)\n"
    assert shown(monkeypatch, io.StringIO()) == lines
    assert shown(monkeypatch, io.StringIO(), wanted=False) == ""


def test_a_program_that_configures_logging_has_the_lines_in_its_log(caplog, capsys) -> None:
    caplog.set_level(logging.INFO)
    bar = Progress(True)
    bar.begin("planning", None)
    bar.end()
    assert caplog.record_tuples == [("mdcs.profiler.progress", logging.INFO, "planning (after 0 s)")]
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_the_next_line_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    written = shown(monkeypatch, Terminal())
    assert re.search(r"\rmdcs: \[#*\.+\]", written)
    assert re.search(r"\]\r\x1b\[Kmdcs: planning", written)
