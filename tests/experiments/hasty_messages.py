"""`experiments.dev.messages` in a hurry: one round of small blocks, two cuts of them."""

import sys
from pathlib import Path

from experiments.dev import messages

messages.CASES = (("zero2", 0.25), ("zero2", 0.0625))
messages.BLOCKS, messages.ELEMENTS = 3, (1 << 20) // 4
messages.FORWARD_S = messages.BACKWARD_S = 0.001
messages.ROUNDS = messages.STEPS = 1

messages.measure(Path(sys.argv[1]))
