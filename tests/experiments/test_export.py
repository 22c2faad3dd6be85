"""`export.py` writes a plan as a file for FSDP2 and says what is lost."""

import json

import pytest

from experiments import export
from mdcs.planner.make import make_plan
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.strategies.uniform import Uniform
from tests.mdcs.profiles import Job, chain, link


@pytest.fixture
def folder(tmp_path):
    plan = make_plan(Job(chain(64, 64, link=link(0.01))), Uniform("zero1"), Dear())
    (tmp_path / "plan.json").write_text(plan.to_json())
    return tmp_path


def test_a_run_s_plan_is_written_beside_it_and_shown(folder, capsys):
    assert export.main([str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "these calls, by FSDP2" in shown and "- a, b: zero1 becomes sdp" in shown
    assert "optim_grads is nearest for 100%" in shown
    file = json.loads((folder / "fsdp2.json").read_text())
    assert [group["modules"] for group in file["groups"]] == [["a"], ["b"], [""]]
    assert file["predicted"]["fsdp2"]["step_s"] > file["predicted"]["mdcs"]["step_s"]
    explained = {key.removeprefix("groups.") for key in file["keys"]}
    assert {*file, *file["groups"][0]} - explained == {"schema", "about", "plan", "keys", "strategy"}


def test_json_is_the_file(folder, capsys):
    assert export.main([str(folder / "plan.json"), "--to", str(folder / "there.json"), "--format", "json"]) == 0
    assert capsys.readouterr().out == (folder / "there.json").read_text() + "\n"


def test_what_is_no_plan_is_one_line(folder, capsys):
    (folder / "other.json").write_text("{}")
    for name, words in (("other.json", "not a plan"), ("none", "No such file")):
        assert export.main([str(folder / name)]) == 2
        said = capsys.readouterr().err
        assert said.startswith("plan: ") and words in said and said.count("\n") == 1


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        export.main(["--help"])
    said = capsys.readouterr().out
    assert "apply_plan" in said and "docs/export.md" in said
