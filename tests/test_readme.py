"""README.md is true: its commands run, its tables name what exists, its links lead somewhere."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from analysis.events import read_events
from experiments.config.files import CONF, groups
from experiments.config.schema import fields_by_key
from mdcs.plan.messages import Plan
from mdcs.plan.strategy import Strategy
from mdcs.planner.named import SCHEDULERS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUNNABLE = re.findall(r"<!-- runnable -->\n```sh\n(.*?)```", README, re.S)
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{path.name}" for path in sorted(ROOT.glob("docs/*.md"))))


def rows(heading: str) -> list[list[str]]:
    """The cells of the table whose first heading this is."""
    table = re.search(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, re.M)
    assert table, heading
    return [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table[1].splitlines()]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """What the marked blocks print, run in order in a folder that has the programs and nothing else."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("experiments", "examples"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
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
    assert "fsdp dear: step 10/10 loss " in said
    assert "memory per rank" in said and "floor: smallest feasible" in said
    events = read_events(folder / "outputs/first/metrics.jsonl")
    assert events[-1]["status"] == "ok" and events[-1]["memory"]["measured"] is not None
    assert "profile reused from" in said and "computing and communicating at the same time" in said
    plans = [Plan.from_json(path.read_text()) for path in folder.glob("outputs/*/*/plan.json")]
    assert {(plan.strategy, plan.scheduler, plan.world) for plan in plans} == {("greedy", "priority", 2), ("fsdp", "dear", 8)}
    [plan] = (plan for plan in plans if plan.world == 2)
    assert plan.profile == Plan.from_json((folder / "outputs/first/plan.json").read_text()).profile
    assert (folder / "outputs/first/timeline.png").stat().st_size > 1000
    assert json.loads((folder / "outputs/first/trace.json").read_text())


@pytest.mark.slow
def test_a_folder_has_the_files_that_are_listed(done):
    sentence = re.search(r"Every job has a folder: (.*?)\(", README, re.S)
    assert sentence
    for name in names(sentence[1]):
        assert (done[0] / "outputs/first" / name).is_file(), name


@pytest.mark.slow
def test_a_sweep_of_two_jobs(done):
    folder, (_, said, *_) = done
    assert "2 jobs in " in said and "fastest" in said
    [record] = folder.glob("multirun/*/*/sweep.json")
    assert [job["status"] for job in json.loads(record.read_text())["jobs"]] == ["ok", "ok"]
    assert (record.parent / "tradeoff.png").is_file() and (record.parent / "table.csv").is_file()


@pytest.mark.slow
def test_a_training_loop_of_one_s_own(done):
    _, (*_, said) = done
    measured = re.search(r"^budget (\d+) bytes, predicted peak \d+ bytes, measured (\d+) bytes$", said, re.M)
    assert measured, said
    assert int(measured[2]) <= int(measured[1])
    loss = re.search(r"^loss ([\d.]+), held out ([\d.]+), 38 tensors$", said, re.M)
    assert loss and float(loss[2]) < 4.15  # 64 classes: ln 64 = 4.16 before training


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


def test_the_table_of_groups_is_conf():
    told = {names(group)[0]: set(names(options)) for group, options, _ in rows("group")}
    assert told == {group: set(options) for group, options in groups().items()}


def test_every_key_and_setting_exists():
    for word in re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`]*)?`", README):
        if not re.search(r"\.(py|json|jsonl|yaml|png|csv|md|optim)$", word) and not hasattr_of_library(word):
            assert word in keys(), word
    given = re.findall(r"\s([a-z]+(?:\.[a-z_]+)?)=\S+", "".join(RUNNABLE))
    for key in {key for key in given if not key.startswith("hydra")}:
        assert key in {*keys(), *groups()}, key


def keys() -> set[str]:
    """All that can be set, whatever is chosen."""
    files = [(path.parent.name, yaml.safe_load(path.read_text(encoding="utf-8"))) for path in CONF.glob("*/*.yaml")]
    return {*fields_by_key(), *(f"{group}.{key}" for group, given in files for key in given)}


def hasattr_of_library(word: str) -> bool:
    import mdcs

    owner, _, name = word.partition(".")
    return owner == "mdcs" and (name in mdcs.__all__ or (ROOT / "mdcs" / name).exists())


def test_the_tables_of_strategies_and_schedulers_are_the_code_s():
    assert [names(row[0])[0] for row in rows("strategy")] == [str(strategy) for strategy in Strategy]
    assert [names(row[0])[0] for row in rows("scheduler")] == list(SCHEDULERS)


def test_the_api_that_is_named_exists():
    import mdcs

    for name in re.findall(r"`mdcs\.([a-zA-Z_]+)`", README):
        assert hasattr(mdcs, name), name
    sentence = re.search(r"`parallel` also has (.*?)\n\n", README, re.S)
    assert sentence
    methods = [name.removesuffix("()") for name in names(sentence[1]) if name.endswith("()")]
    assert len(methods) > 7
    assert [name for name in methods if not hasattr(mdcs.Parallel, name)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_paths_lead_somewhere(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    folders = r"\.ci|mdcs|experiments|analysis|launch|conf|tests|examples|hydra_plugins"
    paths = re.findall(rf"`((?:{folders})/[^`\s*]*)`", text)
    places = [(ROOT / document).parent / link for link in links] + [ROOT / path for path in paths if "NAME" not in path]
    assert [str(place) for place in places if not place.exists()] == []


def test_the_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M))
    for document in DOCUMENTS:
        used = re.findall(r"\bmake (sweep|test-slow|test|bench|lint|install|help|format|clean)\b", (ROOT / document).read_text())
        assert set(used) <= targets
