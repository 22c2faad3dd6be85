"""A program of ranks that torchrun starts: `-m tests.launch.spmd_program FOLDER [blind] WHAT …` runs a job for each WHAT.

Outcomes are in FOLDER/outcomes.json. blind: no rank sees the job's folder.
"""

import dataclasses
import json
import sys
from pathlib import Path

from launch import spmd
from launch.elastic import Cluster
from launch.place import place

if __name__ == "__main__":
    out, *jobs = Path(sys.argv[1]), *sys.argv[2:]
    if jobs[0] == "blind":
        spmd.Job.is_seen = False
        jobs.pop(0)
    ranks = spmd.Ranks(place(), lambda folder, payload: {"MDCS_SAYS": payload})

    def program() -> int:
        outcomes = []
        for number, what in enumerate(jobs):
            outcomes.append(
                ranks.run(
                    out / str(number), Cluster(2, timeout_s=8.0, startup_s=30.0), payload=f"do {what}", arguments=[what],
                    module="tests.launch.ranks.told",
                )  # fmt: skip
            )
            (out / "outcomes.json").write_text(json.dumps([dataclasses.asdict(each) for each in outcomes]))
        print("the program has ended")
        return 7

    sys.exit(ranks.serve(program if ranks.place.rank == 0 else None))
