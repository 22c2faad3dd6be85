"""A plan taken home to torch's fully_shard (FSDP2): as a JSON file, or applied to a model; what of it is lost, and what it costs.

Only `fsdp2` imports torch. Imports `mdcs.simulator` and below.
"""
