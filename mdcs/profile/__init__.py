"""The profile of a job, which planning starts from.

- ``schema``: units, slots and bytes.
- ``layout``: the flat buffers of a unit.
- ``link``: latency and bandwidth.
- ``algorithms``: bytes that collective algorithms send and hold.

Plain data. Imports only `mdcs.sizes` of mdcs, no torch and no Hydra.
"""
