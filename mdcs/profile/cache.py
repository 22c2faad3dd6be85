"""Measured profiles kept on disk: jobs with equal identities share one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from pathlib import Path

from mdcs.profile.schema import SCHEMA, Profile

MEASURED = 12
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
