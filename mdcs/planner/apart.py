"""Calls in a process of its own: threads of this one do not wait for the interpreter while it plans."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar, cast

T = TypeVar("T")

_CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
from mdcs.planner.apart import answer
answer()
"""


def call_apart(function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)``, called in a new process that ends with this one. All are pickled.

    Raises what the function raises, and ChildProcessError if the process ends otherwise.
    """
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(child.kill)
    try:
        said, _ = child.communicate(pickle.dumps(sys.path) + pickle.dumps((function, arguments)))
    finally:
        atexit.unregister(child.kill)
        child.kill()
    if child.returncode:
        raise ChildProcessError(f"the process that plans ended with exit status {child.returncode}")
    value, error = pickle.loads(said)
    if error is not None:
        raise error
    return cast(T, value)


def answer() -> None:
    """Call the function that stdin says, and write its value or its error to stdout. What it prints goes to stderr."""
    function, arguments = pickle.load(sys.stdin.buffer)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        told: tuple[object, Exception | None]
        try:
            told = function(*arguments), None
        except Exception as error:  # any error is the caller's
            told = None, error
        pickle.dump(told, out)
