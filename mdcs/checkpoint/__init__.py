"""Checkpoints on disk: all names are the plain model's; nothing here knows units, strategies or ranks' shards.

- ``pieces``: writes and reads tensors of which a rank has runs of elements, with torch.distributed.checkpoint.
- ``numbers``: plain values and random states, in files of their own.
- ``folder``: decides by its manifest whether a folder is complete.
- ``plain``: reads a checkpoint without ranks.

:mod:`mdcs.runtime.checkpointing` chooses what a run saves. Imports nothing of mdcs.
"""
