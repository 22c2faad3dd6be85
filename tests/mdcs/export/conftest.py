"""The ranks of the runtime's tests."""

from tests.mdcs.runtime.conftest import measured, two

__all__ = ["measured", "two"]
