"""Export of a plan to torch's fully_shard (FSDP2): as a JSON file, or applied to a model; with losses and predicted
cost.

Only `fsdp2` imports torch. Imports `mdcs.simulator` and below.
"""
