"""Measured profiles kept on disk: jobs with equal identities, of which code is a part, share one."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from mdcs.profile.schema import SCHEMA, Profile

MEASURED = 14
"""Version of the measurements. Raise it when equal jobs measure other values than before, e.g. with a new runtime."""


def cache_folder() -> Path:
    """Return ``$MDCS_CACHE/profiles``, or that of the user's cache, ``~/.cache/mdcs/profiles``."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mdcs"
    return Path(os.environ.get("MDCS_CACHE") or home) / "profiles"


def key_of(identity: Mapping[str, str]) -> str:
    """Return the key of all that a profile depends on, 20 hexadecimal digits."""
    parts = dict(identity) | {"schema": str(SCHEMA), "measured": str(MEASURED)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def read(path: Path) -> Profile | None:
    """Return the profile in a file; None if the file cannot be read."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, AttributeError):
        return None


def keep(profile: Profile, path: Path) -> None:
    """Write a profile, atomically. Warn if the file cannot be written; training continues."""
    written = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(profile.to_json(), encoding="utf-8")
        written.replace(path)  # other processes may write it too
    except OSError as error:
        with contextlib.suppress(OSError):
            written.unlink()
        warnings.warn(f"the profile is not kept for later jobs: {error}", stacklevel=3)


def processor() -> str:
    """Return the name of the processor with the number of cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


_INSTALLED = {"site-packages", "dist-packages"}


def code_of(*classes: type, without: Sequence[str] = ("mdcs",)) -> str:
    """Return the hash of the code of classes and their bases, 12 hexadecimal digits: of all Python files in the folders
    of their modules and below (of a module in no package: beside it), but for the packages ``without``; of installed
    packages the version.
    """
    digests: dict[str, str] = {}
    for module in sorted({each.__module__ for cls in classes for each in cls.__mro__}):
        top, file = module.partition(".")[0], getattr(sys.modules.get(module), "__file__", None)
        if file is None or top in sys.stdlib_module_names or f"{module}.".startswith(tuple(f"{w}." for w in without)):
            continue
        if _INSTALLED & {*Path(file).parts}:
            digests[top] = version(top)
            continue
        folder, package = Path(file).parent, sys.modules[module].__package__
        for source in folder.rglob("*.py") if package else folder.glob("*.py"):
            digests[f"{package} {source.relative_to(folder)}"] = hashlib.sha256(source.read_bytes()).hexdigest()
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]


def version(package: str) -> str:
    """Return the version of an installed package; "" for others."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
