"""Measuring one process: tensor memory and time intervals."""
