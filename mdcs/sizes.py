"""Names for sizes. Every size in mdcs is in bytes."""

MIB = 1 << 20
GIB = 1 << 30
