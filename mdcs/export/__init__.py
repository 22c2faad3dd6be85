"""Export of a plan to torch's fully_shard (FSDP2): a JSON file, or calls on a model.

Only `fsdp2` imports torch. Imports `mdcs.plan` and below.
"""
