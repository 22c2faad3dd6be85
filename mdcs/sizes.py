"""Names for sizes, and the padding of parameters. Every size in mdcs is in bytes."""

MIB = 1 << 20
GIB = 1 << 30

_APART = 8
"""Elements, 16 bytes or more: what vector loads and fast kernels want a tensor to begin at."""


def aligned(numel: int) -> int:
    """Return the elements that a parameter takes in a flat buffer, with the padding up to the next parameter."""
    return -(-numel // _APART) * _APART
