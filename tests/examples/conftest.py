"""The ranks of the runtime's tests."""

from tests.mdcs.runtime.conftest import two

__all__ = ["two"]
