"""README.md and docs/ are true: commands run or compose, tables name what exists, links lead somewhere."""

import ast
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from analysis.events import read_events
from experiments.config import checks
from experiments.config.files import CONF, groups
from experiments.config.schema import fields_by_key
from mdcs.plan.period import Strategy
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import SCHEDULERS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNABLE = re.findall(r"<!-- runnable -->\n```sh\n(.*?)```", README, re.S)[1:]  # test_wheel.py runs the first, a loop
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md")) if path.name != "options.md"))
DOCUMENTS = (*PAGES, "CONTRIBUTING.md", "CHANGELOG.md")
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}


def rows(document: str, heading: str) -> list[list[str]]:
    """The cells of the table of a document whose first heading this is."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", TEXT[document], re.M)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def environment(**own: str) -> dict[str, str]:
    """One with the programs of this Python, which find the modules of this repository."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **own}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Output of the marked blocks, run in order in a folder that has the programs and nothing else."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("experiments", "examples"):
        (folder / name).symlink_to(ROOT / name)
    env = environment(OMP_NUM_THREADS="1", MPLBACKEND="Agg")
    said = []
    for block in RUNNABLE:
        ran = subprocess.run(
            ["bash", "-euc", block], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=250
        )
        assert ran.returncode == 0, f"{block}\n{ran.stdout}\n{ran.stderr}"
        said.append(ran.stdout)
    return folder, said


@pytest.mark.slow
def test_one_job_its_plan_and_its_pictures(done):
    folder, (said, *_) = done
    assert "fsdp dear, gpt2-tiny, 2 ranks: step 10/10 loss " in said
    assert "memory per rank" in said and "floor: smallest feasible" in said
    events = read_events(folder / "outputs/first/metrics.jsonl")
    assert events[-1]["status"] == "ok" and events[-1]["memory"]["measured"] is not None
    assert "profile reused from" in said and "computing and communicating at the same time" in said
    plans = [Plan.from_json(path.read_text()) for path in folder.glob("outputs/*/*/plan.json")]
    [plan] = (plan for plan in plans if plan.strategy == "greedy")
    assert plan.profile == Plan.from_json((folder / "outputs/first/plan.json").read_text()).profile
    assert (folder / "outputs/first/timeline.png").stat().st_size > 1000
    assert json.loads((folder / "outputs/first/trace.json").read_text())


def sessions() -> list[tuple[str, list[str]]]:
    """Input of one shell in the documents, and lines of its output, with single spaces."""
    blocks = [block for text in TEXT.values() for block in re.findall(r"^```console\n(.*?)^```", text, re.S | re.M)]
    typed = re.compile(r"^\$ ((?:.*\\\n)*.*)\n", re.M)
    return [
        ("\n".join(typed.findall(block)), [" ".join(line.split()) for line in typed.sub("", block).splitlines() if line != "…"])
        for block in blocks
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "said"), sessions(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_session_is_as_it_is_shown(tmp_path, command, said):
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    shell = subprocess.Popen(
        ["bash", "-c", command], cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = shell.communicate(timeout=250)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # what it has left in the background
    lines = iter(" ".join(line.split()) for line in output.splitlines())
    for wanted in said:  # in this order, others between; … in a line is what differs from run to run
        pattern = re.escape(wanted).replace("…", ".*")
        assert any(re.fullmatch(pattern, line) for line in lines), f"{wanted}\n{output}"


@pytest.mark.slow
def test_bash_completes_groups_options_and_keys(tmp_path):
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    [installs] = re.findall(r"^eval .*-sc install=bash.*$", TEXT["docs/quickstart.md"], re.M)
    types = 'COMP_LINE="$1" COMP_POINT=${#1} COMP_CWORD=2; hydra_bash_completion; echo "${COMPREPLY[@]}"'
    lines = [f"set -- 'python experiments/train.py {word}'; {types}" for word in ("strategy=fs", "budget.li")]
    script = "; ".join([installs, *lines])
    pipes = {"capture_output": True, "text": True, "check": True, "timeout": 250}
    said = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment(), **pipes)
    assert said.stdout.split() == ["strategy=fsdp", "budget.limit="]


@pytest.mark.slow
def test_a_folder_has_the_files_that_are_listed(done):
    for row in rows("docs/configuration.md", "file"):
        for name in names(row[0]):
            assert (done[0] / "outputs/first" / name).exists(), name


@pytest.mark.slow
def test_a_sweep_of_two_jobs(done):
    folder, (_, said, *_) = done
    assert "2 jobs in " in said and "fastest" in said
    [record] = folder.glob("multirun/*/*/sweep.json")
    assert [job["status"] for job in json.loads(record.read_text())["jobs"]] == ["ok", "ok"]
    assert (record.parent / "tradeoff.png").is_file() and (record.parent / "table.csv").is_file()


def test_the_shown_loop_is_the_example_s():
    [shown] = re.findall(r"```python\n(.*?)```", README, re.S)
    lines = [line.strip() for line in shown.splitlines() if line.strip()]
    assert len(lines) < 10
    example = [line.strip() for line in (ROOT / "examples/own_loop.py").read_text().splitlines()]
    where = example.index(lines[0])
    assert example[where : where + len(lines)] == lines


def test_the_example_uses_the_library_alone():
    tree = ast.parse((ROOT / "examples/own_loop.py").read_text())
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert imported == {"mdcs", "torch"}


def test_every_group_is_named():
    [sentence] = re.findall(r"the groups are (.*?)\. ", README, re.S)
    assert set(names(sentence)) == set(groups())


@pytest.mark.parametrize("document", [name for name in PAGES if name != "docs/loops.md"])  # whose model is an object
def test_every_key_and_setting_exists(document):
    sections = {key.partition(".")[0] for key in keys()}
    for section, key in re.findall(r"`([a-z]+)\.([a-z_]+)(?:=[^`]*)?`", TEXT[document]):
        if section in sections and key not in ("py", "json", "yaml", "png"):
            assert f"{section}.{key}" in keys()


TYPED_FIRST = ("README.md", "docs/quickstart.md")


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[] if name in TYPED_FIRST else [pytest.mark.slow])
        for name in PAGES if name not in ("docs/results.md",)  # which tells of past runs
    ],
)  # fmt: skip
def test_every_command_composes(document):
    """The jobs that the shown commands would run, but for files that other commands write."""
    text = TEXT[document]
    settings, asked = dict(re.findall(r'^(\w+)="([^"]*)"$', text, re.M)), set()
    for _, rest in re.findall(r"^\s*(?:PYTHONPATH=\S+ )?mdcs (\w+)(.*)$", text.replace("\\\n", " "), re.M):
        for name, value in settings.items():
            rest = rest.replace(f"${name}", value)
        elsewhere = ("-", "hydra.", "profile.path=", "engine.plan=")
        words = [word for word in shlex.split(rest, comments=True) if "=" in word and not word.startswith(elsewhere)]
        words = [re.sub(r"=(?:int\()?(?:interval|range)\(([^,]*),.*", r"=\1", word) for word in words]  # lower ends
        if "--config-dir" not in rest:
            asked.add(tuple(re.sub(r"^((?!.*\[).*?=[^,]*),.*", r"\1", word) for word in words))
    with checks.composing():
        for overrides in sorted(asked):
            checks.compose_config(overrides)


@cache
def keys() -> set[str]:
    """All that can be set, whatever is chosen."""
    files = [(path.parent.name, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in CONF.glob("*/*.yaml")]
    return {*fields_by_key(), *(f"{group}.{key}" for group, given in files for key in given)}


def test_the_tables_of_strategies_and_schedulers_are_the_code_s():
    assert [names(row[0])[0] for row in rows("docs/concepts.md", "strategy")] == [str(strategy) for strategy in Strategy]
    assert [names(row[0])[0] for row in rows("docs/concepts.md", "scheduler")] == list(SCHEDULERS)


@pytest.mark.parametrize("document", PAGES)
def test_the_api_that_is_named_exists(document):
    import mdcs

    for name in re.findall(r"`mdcs\.([a-zA-Z_]+)[`(]", TEXT[document]):
        assert hasattr(mdcs, name), name
    for name in re.findall(r"`parallel\.([a-z_]+)\(", TEXT[document]):
        assert hasattr(mdcs.Session, name), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document):
    text = TEXT[document]
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link and link != "options.md"]  # is made
    folders = r"\.ci|mdcs|experiments|analysis|launch|conf|tests|examples|hydra_plugins"
    paths = re.findall(rf"`((?:{folders})/[^`\s*]*)`", text)
    places = [(ROOT / document).parent / link for link in links] + [ROOT / path for path in paths if "NAME" not in path]
    assert [str(place) for place in places if not place.exists()] == []


def test_the_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        used = re.findall(r"\bmake (sweep|test-slow|test|bench|docs|lint|install|help|format|clean)\b", TEXT[document])
        assert set(used) <= targets
