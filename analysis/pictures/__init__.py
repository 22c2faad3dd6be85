"""The pictures of a sweep and of a run. Each function returns a matplotlib Figure; `save` writes it.

In all of them: measured is solid, predicted is dashed or hollow, the star is the fastest of what is shown, other
engines are black or grey, colours survive colour-blindness. A series has one colour and mark in all pictures of a
workload (`looks`).
"""

from analysis.pictures.comparisons import engine_comparison, predictions
from analysis.pictures.period import gantt, memory_over_period
from analysis.pictures.step_time import overview, step_time_over_memory, step_time_over_setting, tradeoff_curve
from analysis.pictures.style import save

__all__ = [
    "engine_comparison", "gantt", "memory_over_period", "overview", "predictions", "save",
    "step_time_over_memory", "step_time_over_setting", "tradeoff_curve",
]  # fmt: skip
