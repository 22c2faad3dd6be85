"""`experiments.dev.peaks` in a hurry: a step under three budgets."""

import sys
from pathlib import Path

from experiments.dev import peaks

peaks.BUDGETS, peaks.WARMUP, peaks.STEPS = 3, 1, 1

peaks.measure(Path(sys.argv[1]))
