"""Checkpoints on disk: all names are the plain model's; nothing here knows units, strategies or ranks' shards.

- ``dcp_shards``: writes and reads tensors of which a rank has runs of elements, with torch.distributed.checkpoint;
  reads a checkpoint without ranks.
- ``directory``: decides by its manifest whether a folder is complete; plain values and random states, in files of their
  own.

:mod:`mdcs.runtime.checkpointing` chooses what a run saves. Imports nothing of mdcs.
"""
