"""A plan for other runtimes: what of it torch's fully_shard (FSDP2) can do, as a JSON file or applied to a model, and what is lost.

`groups`, `costs` and `document` import no torch; `fsdp2` does, and nothing else of mdcs that does. Imports `mdcs.simulator` and below.
"""
