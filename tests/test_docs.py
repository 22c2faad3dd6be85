"""docs/ tells of what there is: every room, strategy and scheduler; links are followed by test_readme.py."""

import re
from pathlib import Path

import pytest

from experiments.config.files import groups

ROOT = Path(__file__).resolve().parents[1]


def first_cells(document: str, heading: str) -> set[str]:
    """The names in the first column of the table with this first heading."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / document).read_text(), re.M)
    assert table, heading
    return {name for row in table[1].splitlines() for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


def test_the_architecture_has_every_room_of_the_library():
    library = ROOT / "mdcs"
    rooms = {f"mdcs/{path.parent.name}/" for path in library.glob("*/__init__.py")}
    modules = {f"mdcs/{path.name}" for path in library.glob("*.py")} - {"mdcs/__init__.py"}
    assert len(rooms) > 5
    assert first_cells("architecture.md", "room") == rooms | modules
    picture = (ROOT / "docs/architecture.svg").read_text()
    assert [room for room in rooms if f">{Path(room).name}</text>" not in picture] == []


def test_the_glossary_has_every_strategy_and_scheduler():
    sections = (ROOT / "docs/glossary.md").read_text().split("\n## ")
    [strategies, schedulers] = [
        set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.M)))) for section in sections[1:3]
    ]
    assert strategies == {"dp", "zero2", "sdp", "fsdp", "hsdp_no_reshard", "hsdp"}
    assert schedulers - {"joint"} == {path.stem for path in (ROOT / "conf/scheduler").glob("*.yaml")} - {"joint"}


def test_every_line_of_what_loops_may_do_names_tests_that_there_are():
    page = (ROOT / "docs/dev/loop-behaviours.md").read_text()
    tables = re.findall(r"^\|.*\| test \|\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 60
    files = {"models": "loops_models", "habits": "loops_habits", "aliases": "random_aliases", "calls": "optimizer_calls"}
    files |= {"side": "side_passes", "otherwise": "modules_otherwise"}
    for row in rows:
        cell = row.rsplit("|", 2)[1]
        assert re.fullmatch(r" `\w+\.\w+`(, `\w+\.\w+`)* ", cell), row
        for module, name in re.findall(r"`(\w+)\.(\w+)`", cell):
            tests = "".join(path.read_text() for path in ROOT.glob(f"tests/**/test_{files.get(module, module)}.py"))
            assert re.search(rf"^(def test_{name}|def {name}|class {name}|{name})\b", tests, re.MULTILINE), (module, name)


def test_the_options_page_has_every_option(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import options_reference

    lines = options_reference.page().splitlines()
    wanted = {f"- `{group}={option}`" for group, options in groups().items() if f"## {group}" in lines for option in options}
    assert len(wanted) > 80 and wanted - {line.partition(":")[0] for line in lines} == set()
    assert any("classes whose modules become units" in line for line in lines)  # a key of model=own
