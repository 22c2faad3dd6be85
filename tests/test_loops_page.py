"""docs/loops.md: every line names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = [line for line in (ROOT / "docs/loops.md").read_text().splitlines() if line.startswith("| ") and "| test |" not in line]
NAMES = sorted(set(re.findall(r"`([a-z_]+)\.(\w+)`", "\n".join(row.rsplit("|", 2)[1] for row in ROWS))))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:60])
def test_every_line_names_a_test(row):
    assert re.fullmatch(r" `\w+\.\w+`(, `\w+\.\w+`)* ", row.rsplit("|", 2)[1])


@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_the_tests_are_there(module, name):
    files = {"loops": "loops", "models": "loops_models", "habits": "loops_habits"}
    place = "model/test_units" if module == "units" else f"runtime/test_{files.get(module, module)}"
    text = (ROOT / f"tests/mdcs/{place}.py").read_text()
    assert re.search(rf"^(def test_{name}|def {name}|class {name}|{name}\b.* =)", text, re.MULTILINE)
