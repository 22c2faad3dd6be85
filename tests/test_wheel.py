"""The wheel is the library: it starts in an environment that has what it asks pip for, far from the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "mdcs", "analysis", "hydra_plugins"

pytestmark = pytest.mark.slow


def said_by(*command: str | Path, cwd: Path, **env: str) -> str:
    """Output of a command, which is not told where the checkout is."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    ran = subprocess.run(command, cwd=cwd, env=inherited | env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools takes along what an earlier build left in a tree."""
    folder = tmp_path_factory.mktemp("wheel")
    left = shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "outputs", "multirun", "results")
    shutil.copytree(ROOT, folder / "source", ignore=left)
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    said_by(*build, folder / "source", cwd=folder)
    [built] = folder.glob("*.whl")
    return built


def needed(requirements: Iterable[str], extras: Iterable[str] = ("",)) -> dict[str, Distribution]:
    """Packages that pip installs for these requirements with these extras, as they are installed here, by name."""
    found: dict[str, Distribution] = {}
    for each in map(Requirement, requirements):
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in extras):
            there = distribution(each.name)
            assert each.specifier.contains(there.version, prereleases=True), each
            found |= {each.name: there, **needed(there.requires or (), ("", *each.extras))}
    return found


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of an environment that has the wheel, and links to what it needs."""
    folder = tmp_path_factory.mktemp("environment")
    said_by(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    found = folder / "venv/bin/python"
    said_by(found, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [packages] = (folder / "venv/lib").glob("python*/site-packages")
    [ours] = distributions(name="mdcs", path=[str(packages)])
    for package in needed(ours.requires or ()).values():
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(package.locate_file(name))
    return found


def test_the_wheel_has_the_library_and_nothing_else(wheel):
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    sources = {path for package in LIBRARY for path in (ROOT / package).rglob("*") if path.suffix in (".py", ".c", ".html")}
    sources = {path for path in sources if path.parent.name != "notebooks"}
    assert packed == {str(path.relative_to(ROOT)) for path in sources}
    assert "mdcs/telemetry/shim.c" in packed


def test_torch_numpy_and_the_solver_are_all_it_needs(python, tmp_path):
    installed = said_by(python, "-m", "pip", "list", "--format=freeze", cwd=tmp_path)
    assert {"torch", "numpy", "mip", "highspy"} <= {line.partition("==")[0] for line in installed.splitlines()}
    assert not re.search(r"^(hydra|omegaconf|fairscale|pandas|matplotlib|rich|wandb|transformers)", installed, re.M)


def test_all_names_are_there_and_a_missing_extra_is_one_sentence(python, tmp_path):
    program = """
import mdcs
for name in mdcs.__all__:
    getattr(mdcs, name)
try:
    mdcs.BySize(1)
except ModuleNotFoundError as error:
    print(error)
"""
    assert said_by(python, "-c", program, cwd=tmp_path) == "mdcs.BySize needs fairscale: pip install 'mdcs[wrap]'\n"


def test_hydra_finds_the_launcher_for_any_program(python, tmp_path):
    """With the packages of the extra `hydra`, which has no other of ours."""
    (tmp_path / "extra").mkdir()
    for package in needed(["hydra-core"]).values():
        for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
            (tmp_path / "extra" / name).symlink_to(package.locate_file(name))
    (tmp_path / "app.py").write_text('import hydra\n@hydra.main(version_base="1.3")\ndef main(config): pass\nmain()\n')
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    paths = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "extra")}
    asked = ("hydra/launcher=mdcs_slurm", "hydra.launcher.wait=false", "hydra/sweeper=mdcs", "hydra.sweep.dir=out", "+x=1,2")
    said = said_by(python, "app.py", "-m", *asked, cwd=tmp_path, **paths)
    assert "submitted: 7_0, 7_1" in said and f"{tmp_path}/app.py +x=2" in (tmp_path / "out/submitted/7.sh").read_text()


def test_two_ranks_train_elsewhere(python, tmp_path):
    """As README.md says, in a folder that has one's own training loop alone."""
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/own_loop.py", tmp_path / "examples")
    [command] = re.findall(r"^torchrun .*own_loop\.py$", (ROOT / "README.md").read_text(), re.M)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    command = command.replace("torchrun ", "python -m torch.distributed.run ")  # the script has the Python of its environment
    said = said_by("bash", "-euc", command, cwd=tmp_path, PATH=path, OMP_NUM_THREADS="1", HOME=str(tmp_path))
    measured = re.search(r"^budget (\d+) bytes, predicted peak \d+ bytes, measured (\d+) bytes$", said, re.M)
    assert measured, said
    assert int(measured[2]) <= int(measured[1])
    loss = re.search(r"^loss ([\d.]+), held out ([\d.]+), 38 tensors$", said, re.M)
    assert loss and float(loss[2]) < 4.15  # 64 classes: ln 64 = 4.16 before training
