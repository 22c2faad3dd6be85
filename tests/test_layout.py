"""Shape of the tree, as far as no linter holds it; who may import whom is in pyproject.toml, and `make lint` checks it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mdcs", "benchmarks", "experiments", "analysis", "launch", "hydra_plugins")


def test_no_module_is_a_drawer():
    """Modules are named after their one concept."""
    names = {file.stem for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert len(names) > 80
    assert names & {"utils", "util", "helpers", "common", "misc", "base_utils"} == set()
