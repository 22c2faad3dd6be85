"""Export of a plan to torch's fully_shard (FSDP2): a JSON file, or calls on a model, with losses and predicted cost.

Only `fsdp2` imports torch. Imports `mdcs.simulator` and below.
"""
