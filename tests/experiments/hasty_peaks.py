"""`experiments.dev.peaks` in a hurry: a step under three budgets."""

import sys
from pathlib import Path

from experiments.dev import peaks

peaks.WARMUP = peaks.STEPS = 1

peaks.measure(Path(sys.argv[1]), budgets=3)
