"""`export.py` writes a plan as a file for FSDP2."""

import json

import pytest

from experiments import export
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Dear
from mdcs.planner.strategies import Uniform
from tests.mdcs.profiles import Job, chain, link


@pytest.fixture
def folder(tmp_path):
    plan = make_plan(Job(chain(64, 64, link=link(0.01))), Uniform("zero2"), Dear())
    (tmp_path / "plan.json").write_text(plan.to_json())
    return tmp_path


def test_a_run_s_plan_is_written_beside_it_and_shown(folder, capsys):
    assert export.main([str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "as calls of fully_shard" in shown
    file = json.loads((folder / "fsdp2.json").read_text())
    assert [group["modules"] for group in file["groups"]] == [["a"], ["b"], [""]]


def test_another_plans_file_is_not_lost(folder, capsys):
    assert export.main([str(folder)]) == 0 == export.main([str(folder)])  # the same plan's is written again
    before = (folder / "fsdp2.json").read_text()
    (folder / "plan.json").write_text(make_plan(Job(chain(64, 64, link=link(0.01))), Uniform("fsdp"), Dear()).to_json())
    capsys.readouterr()
    assert export.main([str(folder)]) == 2 and (folder / "fsdp2.json").read_text() == before
    said = capsys.readouterr().err
    assert "is the export of another plan" in said and "add --force" in said and said.count("\n") == 1
    assert export.main([str(folder), "--force"]) == 0 and (folder / "fsdp2.json").read_text() != before
    (folder / "mine.json").write_text("[1]")
    assert export.main([str(folder), "--to", str(folder / "mine.json")]) == 2
    assert "mine.json is no export" in capsys.readouterr().err


def test_what_is_no_plan_is_one_line(folder, capsys):
    (folder / "other.json").write_text("{}")
    for name, words in (("other.json", "not a plan"), ("none", "No such file")):
        assert export.main([str(folder / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("plan: ") and words in said and said.count("\n") == 1
