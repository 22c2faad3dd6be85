"""The ranks of the runtime's tests."""

from tests.mdcs.conftest import two

__all__ = ["two"]
