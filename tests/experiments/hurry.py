"""Times are measured roughly when this is imported: a profile that no test looks at takes a fraction of its seconds."""

from mdcs.profiler import model_profile

model_profile._CACHES, model_profile._LONG = 1 << 16, 1 << 14
