"""`experiments.dev.messages` in a hurry: one round of small blocks, two cuts of them."""

import sys
from pathlib import Path

from experiments.dev import messages
from experiments.tasks.timed import Timed

messages.CASES = (("zero2", 0.25), ("zero2", 0.0625))
messages.MODEL = Timed(layers=3, block_mib=1, forward_ms=1, backward_ms=1, tensors=1)
messages.ROUNDS = messages.STEPS = 1

messages.measure(Path(sys.argv[1]))
