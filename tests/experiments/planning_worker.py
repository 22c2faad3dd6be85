"""Stands in for `experiments.job.worker --plan-only`: plans for a profile that was measured elsewhere."""

import os
import sys
from pathlib import Path

import mdcs
from experiments.config.checks import load
from experiments.job.profiles import job_of, make_plan

folder = Path(sys.argv[1])
config = load(folder / "config.yaml")
profile = mdcs.Profile.from_json(Path(__file__).with_name("profile.json").read_text())
if os.environ["RANK"] == "0":
    job = job_of(config, profile)
    plan = make_plan(config, job, mdcs.floor_bytes(job))
    (folder / "plan.json").write_text(plan.to_json())
