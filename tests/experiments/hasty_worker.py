"""`experiments.job.worker` in a hurry."""

import runpy

from tests.experiments import hurry  # noqa: F401

runpy.run_module("experiments.job.worker", run_name="__main__", alter_sys=True)
