"""The ranks of the runtime's tests."""

from tests.mdcs.runtime.conftest import measured, measured_nodes, nodes, two

__all__ = ["measured", "measured_nodes", "nodes", "two"]
