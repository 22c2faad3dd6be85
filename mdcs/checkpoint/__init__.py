"""Checkpoints on disk: they name everything as the plain model does, and know nothing of units, strategies or ranks.

``pieces`` writes and reads tensors of which a rank has runs of elements, with torch.distributed.checkpoint; ``numbers`` is the
rest; ``folder`` says which folder counts, by its manifest; ``plain`` reads one without ranks. What a run puts into one is in
:mod:`mdcs.runtime.checkpointing`. Imports nothing of mdcs.
"""
