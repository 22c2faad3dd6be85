"""Times are measured roughly when this is imported: a profile that no test looks at takes a fraction of its seconds."""

from mdcs.profiler import calibration, link_timing, update_timing
from mdcs.sizes import MIB

link_timing._SIZES, link_timing._TRAIN, link_timing._TURNS, link_timing._REPEATS = (MIB // 64, MIB // 16, MIB // 4), MIB, 1, 3
link_timing._OF_CHOSEN = 2
update_timing._CACHES, update_timing._LONG = 1 << 16, 1 << 14
calibration._MOST_ROUNDS = 1
