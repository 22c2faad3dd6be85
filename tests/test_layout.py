"""The one-way order of imports: the planning half knows no cluster, the runtime no planner, the library no
application.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mdcs", "experiments", "analysis", "launch", "hydra_plugins")
PLANNING = ("mdcs/profile", "mdcs/plan", "mdcs/simulator", "mdcs/planner", "mdcs/model")
APPLICATIONS = ("experiments", "analysis", "launch", "hydra_plugins")


def sources(*under: str) -> list[Path]:
    """The Python files of the given modules and packages."""
    found: list[Path] = []
    for path in map(ROOT.joinpath, under):
        files = [path.with_suffix(".py")] if path.with_suffix(".py").is_file() else list(path.rglob("*.py"))
        assert files, f"there is no {path}"
        found += files
    return sorted(found)


def imported(file: Path) -> set[str]:
    """Full names of all modules that a file imports, anywhere in it; `from a import b` counts as `a` and
    `a.b`.
    """
    names: set[str] = set()
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def breaches(files: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in sorted(imported(file))
        if any(name == each or name.startswith(f"{each}.") for each in forbidden)
    ]


@pytest.mark.parametrize(
    ("who", "forbidden"),
    [
        (PLANNING, ("torch.distributed", "hydra", "omegaconf")),
        (("mdcs",), ("hydra", "omegaconf", "wandb", "rich", *APPLICATIONS)),
        (("mdcs/runtime",), ("mdcs.planner", "mdcs.calibrate")),
        (("analysis",), ("experiments", "launch", "hydra_plugins")),
        (("launch",), ("experiments", "analysis", "mdcs", "hydra_plugins")),
        (("hydra_plugins",), ("experiments", "analysis", "launch", "mdcs")),
    ],
    ids=["planning", "library", "runtime", "analysis", "launch", "hydra_plugins"],
)
def test_imports_go_one_way(who, forbidden):
    files = sources(*who)
    assert files
    assert breaches(files, forbidden) == []


def test_a_breach_is_seen(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "mdcs").mkdir()
    file = tmp_path / "mdcs" / "bad.py"
    file.write_text("def f():\n    from torch import distributed as d\n    from ..experiments import train\n")
    assert breaches([file], ("torch.distributed",)) == ["mdcs/bad.py imports torch.distributed"]
    assert "experiments.train" in imported(file)


def test_no_module_is_a_drawer():
    """Modules are named after their one concept."""
    names = {file.stem for file in sources(*PACKAGES)}
    assert names & {"utils", "util", "helpers", "common", "misc", "base_utils"} == set()


def test_every_module_says_what_it_is():
    silent = [
        str(file.relative_to(ROOT))
        for file in sources(*PACKAGES)
        if (source := file.read_text(encoding="utf-8")).strip() and not ast.get_docstring(ast.parse(source))
    ]
    assert silent == []
