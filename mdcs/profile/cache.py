"""Measured profiles kept on disk: jobs with equal identities share one. The code of the model is part of an identity: a
model whose code has changed is another one, even if all options are the same.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mdcs.profile.schema import SCHEMA, Profile

MEASURED = 13
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


# ---- code

_INSTALLED = ("site-packages", "dist-packages")


def code_of(cls: type, not_followed: Sequence[str] = ("mdcs",)) -> str:
    """Return the hash of the code of a class, 12 hexadecimal digits: of its module and all modules that these import,
    wherever in a file, but for the packages ``not_followed``; of installed packages the version.

    Comments and layout do not change it; docstrings do.
    """
    left = [each.__module__ for each in cls.__mro__ if each.__module__ != "builtins"]
    digests, visited = dict[str, str](), set[str]()
    while left:
        name = left.pop()
        top = name.partition(".")[0]
        followed = not any(name == each or name.startswith(f"{each}.") for each in not_followed)
        if name in visited or top in sys.stdlib_module_names or not followed:
            continue
        visited.add(name)
        file = _file_of(name)
        if file is None:
            continue
        if any(part in _INSTALLED for part in file.parts):
            digests[top] = version(top)
            continue
        stat = file.stat()
        digest, imports = _read(str(file), stat.st_mtime_ns, stat.st_size)
        digests[name] = digest
        left += _absolute(imports, name, file.name == "__init__.py")
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:12]


def _absolute(imports: tuple[tuple[int, str, str], ...], module: str, is_package: bool) -> Iterator[str]:
    """Yield the names of the modules that the imports of ``module`` may mean, with their parent packages."""
    for level, base, name in imports:
        if level:
            parts = module.split(".")
            parts = parts[: len(parts) - level + is_package]
            base = ".".join([*parts, base] if base else parts)
        full = f"{base}.{name}" if name else base
        parts = full.split(".")
        yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


@functools.cache
def _read(file: str, changed: int, size: int) -> tuple[str, tuple[tuple[int, str, str], ...]]:
    """Return the hash of a file's code, and its imports as (number of leading dots, module, imported name or "")."""
    text = Path(file).read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(text)
        code = ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError):  # the import reports the error, if it is one
        return hashlib.sha256(text.encode()).hexdigest(), ()
    imports: list[tuple[int, str, str]] = []
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            imports += [(node.level, node.module or "", alias.name) for alias in node.names]
    return hashlib.sha256(code.encode()).hexdigest(), tuple(imports)


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those below `if TYPE_CHECKING`: imports of types are never executed."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING")):
                left.append(child)


def _file_of(name: str) -> Path | None:
    """Return the Python file of a module, found without importing its packages; None if there is none."""
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if loaded is None:
        loaded = _search(name)
    return Path(loaded) if loaded is not None and loaded.endswith(".py") and Path(loaded).is_file() else None


def _search(name: str) -> str | None:
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)  # the top-level name alone: find_spec imports nothing
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not rest:
        return spec.origin
    for place in spec.submodule_search_locations or ():
        inside = Path(place).joinpath(*rest)
        for file in (inside.with_suffix(".py"), inside / "__init__.py"):
            if file.is_file():
                return str(file)
    return None


def version(package: str) -> str:
    """Return the version of an installed package; "" for others."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
