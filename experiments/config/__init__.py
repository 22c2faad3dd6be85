"""Configs of experiments: the schema, its checks, and errors of one line with the full key."""
