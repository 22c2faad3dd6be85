"""Engines that train a job: mdcs, and its peers in the same loop, with the same data and the same measurement.

A module here is an engine: its options (`experiments.config.schema.EngineOptions`), which `_target_` of a file in
conf/engine names, and the object that `prepare` returns. The training loop uses only the protocol `Engine`.
"""
