"""Ranks count the steps that depart from the plan together, beside other collectives."""

from __future__ import annotations

import torch.distributed as dist

import mdcs
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_loops import how, one_step
from tests.mdcs.runtime.training import Job, optimizer_for, plan_for, profile_of, setup


def one_step_more_on_rank_one() -> list[str]:
    job, made = Job("tied"), setup("tied")
    optimizer, units = optimizer_for("adam", made.model), mdcs.partition(made.model, made.policy)
    plan = plan_for(job, how("dp"), profile_of(job, how("dp"), made, units, optimizer))
    parallel = mdcs.parallelize(made.model, optimizer, plan, units, timeout_s=5, replan_after=100, progress=False)
    found = []
    for number in range(2 + dist.get_rank()):
        one_step(made, parallel, number)
    try:
        parallel.state_dict()
    except mdcs.RunError as error:
        found.append(str(error))
    parallel.close(whole=False)
    return found


def test_ranks_that_run_unequal_numbers_of_steps_are_named(two: Ranks):
    """A collective of another size in the group of these calls would end the process."""
    for [told] in two.run(one_step_more_on_rank_one):
        assert "rank 0 is in step 3, and rank 1 in step 4" in told
    two.stop()
