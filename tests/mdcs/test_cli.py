"""`mdcs NAME` runs a program of the checkout, from any folder."""

import subprocess
import sys

import pytest

from mdcs import cli


def test_the_list_says_what_every_program_does(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in (cli.PROGRAMS | cli.MEASURING).items():
        [about] = {line for line in lines if line.startswith(f"  {name} ")}
        assert about.endswith("."), path


def test_every_program_of_the_checkout_has_a_name():
    known = {path for path in (cli.PROGRAMS | cli.MEASURING).values() if path.startswith("experiments/")}
    programs = {file for file in (cli._CHECKOUT / "experiments").glob("*.py") if "def main(" in file.read_text()}
    assert known == {f"experiments/{file.name}" for file in programs}


@pytest.mark.parametrize(("typed", "hint"), [("trian", "did you mean train?"), ("xyz", "commands: train, profile, plan, ")])
def test_a_mistyped_name_is_one_line(capsys, typed, hint):
    assert cli.main([typed]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"mdcs: no command {typed}; {hint}")


def test_without_a_checkout_it_says_where_the_programs_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    assert cli.main(["train"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_arguments_and_the_exit_status_are_the_program_s(tmp_path):
    command = [sys.executable, "-m", "mdcs.cli", "train", "strategy=gredy"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.startswith("strategy: no such option gredy; options: dp,")
