"""Hash of the code of a class: its module, and the modules of the same project that it imports.

A model whose code has changed is another one, even if all options are the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_INSTALLED = ("site-packages", "dist-packages")


def code_of(cls: type, not_followed: Sequence[str] = ("mdcs",)) -> str:
    """Return the hash of the code of a class, 12 hexadecimal digits.

    ``not_followed``: packages that are left out. The hash covers the module of the class, all modules of its project
    that these modules import, wherever in a file, and the versions of installed packages. Comments and layout do not
    change it; docstrings do.
    """
    projects = {cls.__module__.partition(".")[0]}
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
        if top not in projects and any(part in _INSTALLED for part in file.parts):
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


def is_installed(cls: type) -> bool:
    """Whether a class is of an installed package, or of Python itself: its version says what its code is."""
    top = cls.__module__.partition(".")[0]
    file = _file_of(cls.__module__)
    return top in sys.stdlib_module_names or file is not None and any(part in _INSTALLED for part in file.parts)


def version(package: str) -> str:
    """Return the version of an installed package; "" for others."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
