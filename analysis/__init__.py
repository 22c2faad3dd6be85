"""Read what runs and sweeps wrote, compare prediction with measurement, draw it.

`python -m analysis FOLDER` writes the table and all pictures of a sweep or a run.
"""

from analysis.load import Run, load_run, load_sweep, table_of
from analysis.report import write_report
from analysis.table import print_table, write_csv
from analysis.tradeoff import best_run, stop_point

__all__ = [
    "Run",
    "best_run",
    "load_run",
    "load_sweep",
    "print_table",
    "stop_point",
    "table_of",
    "write_csv",
    "write_report",
]
