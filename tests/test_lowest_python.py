"""The pins of constraints.txt can be installed with the lowest Python."""

import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
LOWEST = SETUP["options"]["python_requires"].removeprefix(">=")
PINS = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
AS_SOURCE = ("deepspeed", "fairscale")  # no wheels of these are to be had, for any Python
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def pip(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*PIP, *arguments], capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_the_pins_have_wheels_for_the_lowest_python(tmp_path):
    """By the metadata of the registry: nothing is installed."""
    if pip("download", "--no-deps", "--dest", str(tmp_path), "iniconfig").returncode:
        pytest.skip("no registry of packages is reachable")
    pins = [f"{name}=={version}" for name, version in PINS if name not in AS_SOURCE]
    assert len(pins) > 40
    done = pip("install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--python-version", LOWEST,
               "--target", str(tmp_path / "none"), *pins)  # fmt: skip
    assert done.returncode == 0, done.stderr
