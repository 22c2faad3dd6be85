"""Workloads of jobs, without ranks."""

from pathlib import Path

import pytest
import torch

from experiments.job.worker import train
from experiments.job.workload import Workload
from launch import elastic
from tests.experiments.batch import composed

PROFILE = Path(__file__).parents[1] / "profile.json"


def workload(*overrides: str, world: int) -> Workload:
    config = composed("model=mlp", "data=digits", *overrides)
    return Workload(config, min(1, world - 1), world, torch.device("cpu"))


def test_too_few_held_out_samples_are_an_error_before_the_first_step(tmp_path):
    """64 ranks have a batch to train on and none to evaluate on."""
    many = workload("run.eval_every=100", "data.batch_size=4", world=64)
    next(many.batches())
    with pytest.raises(ValueError, match="digits has 179 held-out samples, fewer than one global batch of 64 ranks times 4"):
        train(tmp_path, many)


def test_a_profile_of_a_model_of_other_shapes_is_refused_with_what_measures_anew():
    """As where the model's code has changed since it was measured, and somebody names it all the same."""
    with pytest.raises(ValueError) as error:
        workload(f"profile.path={PROFILE}", "cluster.ranks=2", world=2).known_profile()
    first = "its unit 0 is embed of 1,000 parameters, the model's is linear0 of 16,640 parameters"
    anew = "measure it anew (profile.refresh=true, without profile.path)"
    assert str(error.value) == f"the profile {PROFILE} is of another model: {first}; {anew}"


def test_a_batch_of_another_model_is_named():
    made = workload("data=synthetic", world=2)
    inputs = {name: value for name, value in next(made.batches()).items() if name != "labels"}
    with pytest.raises(ValueError, match=f"model.loss: a batch of data=synthetic has no 'labels', only {', '.join(inputs)}"):
        made.loss(inputs)


@pytest.mark.parametrize(("asked", "measured"), [("floor+10%", None), ("10KiB", "measured")])
def test_recomputation_is_measured_where_the_budget_needs_it(asked, measured):
    made = workload("cluster.ranks=1", "run.profile_iterations=1", f"budget='{asked}'", world=1)
    assert made.profile().about.get("recomputation") == measured


@pytest.mark.slow
def test_one_rank_prepares_data_for_the_others_and_is_not_ended_as_hung(tmp_path):
    timeout_s = 8.0
    cluster = elastic.Cluster(2, timeout_s, startup_s=1)
    arguments = [str(tmp_path), str(timeout_s)]
    outcome = elastic.run(tmp_path, cluster, {}, module="tests.experiments.preparing_worker", arguments=arguments)
    assert outcome == elastic.Outcome(True) and (tmp_path / "order").read_text() == "01"
