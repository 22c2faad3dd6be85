"""`mdcs NAME` runs a program of the checkout, from any folder."""

import subprocess
import sys
from importlib import metadata

import pytest

from mdcs import cli


def test_the_list_says_what_every_program_does(capsys):
    assert cli.main([]) == cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, path in cli.PROGRAMS.items():
        [about] = {line for line in lines if line.startswith(f"  {name} ")}
        assert about.endswith("."), path


def test_every_program_of_the_checkout_has_a_name():
    known = {path for path in cli.PROGRAMS.values() if path.startswith("experiments/")}
    programs = {file for file in cli._CHECKOUT.glob("experiments/*.py") if "def main(" in file.read_text()}
    assert known == {str(file.relative_to(cli._CHECKOUT)) for file in programs}


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        (["trian"], "mdcs: no command trian; did you mean train?"),
        (["xyz"], "mdcs: no command xyz; commands: train, profile, plan, "),
    ],
)
def test_a_mistyped_name_is_one_line(capsys, typed, line):
    assert cli.main(typed) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


def test_without_a_checkout_it_says_where_the_programs_are(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)
    assert cli.main(["train"]) == 2
    assert "clone the repository" in capsys.readouterr().err


def test_arguments_and_the_exit_status_are_the_program_s(tmp_path):
    command = [sys.executable, "-m", "mdcs.cli", "train", "strategy=gredy"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.startswith("strategy: no such option gredy; options: dp,")


def test_help_and_version_are_answered_as_other_commands_do(capsys):
    assert cli.main(["help"]) == cli.main(["--help"]) == 0
    half = capsys.readouterr().out
    assert half[: len(half) // 2] == half[len(half) // 2 :]
    assert cli.main(["--version"]) == cli.main(["train", "--version"]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {f"mdcs {metadata.version('mdcs')}"}


def test_tab_completes_commands_and_their_options(tmp_path):
    offered = {"mdcs tr": "train", "mdcs plan strategy=gre": "strategy=greedy", "mdcs train run.accum": "run.accumulation="}
    script = f"""
        eval "$({sys.executable} -m mdcs.cli -sc install=bash)"
        mdcs() {{ {sys.executable} -m mdcs.cli "$@"; }}
        command() {{ echo /bin/true; }}
        complete -p mdcs >/dev/null || exit 1
    """
    for typed in offered:
        script += f"""
        COMP_LINE="{typed}" COMP_POINT={len(typed)} COMP_CWORD={typed.count(" ")}
        hydra_bash_completion; echo "${{COMPREPLY[@]}}"
        """
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout.split() == [*offered.values()], ran.stderr
