"""The profile of a job, which planning starts from.

- ``schema``: units, slots and bytes.
- ``layout``: the flat buffers of a unit.
- ``link``: latency and bandwidth, bytes that collective algorithms send and hold, costs of messages on the rank.
- ``cache``: profiles kept on disk.

Plain data. Imports only `mdcs.sizes` of mdcs, no torch and no Hydra.
"""
