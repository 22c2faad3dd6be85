"""A plan that does not fit its budget is a row of a sweep, of plans, of a comparison and of a curve; the exit is 0."""

import csv
import json

from experiments import compare, curve, plan, train
from experiments.job import record
from tests.experiments import one_process

JOB = ("model=mlp", "data=synthetic", "cluster.threads=1", "run.profile_iterations=1", "run.steps=3", "budget=floor+30%")


def test_a_sweep_has_a_row_for_what_does_not_fit_and_does_not_run_it_again(tmp_path, warm, no_pictures):
    def ran(program, *arguments):
        return one_process.call(program, tmp_path, *JOB, *arguments, start=warm.run)

    sweep = ("-m", "strategy=dp,fsdp", f"hydra.sweep.dir={tmp_path}/sweep")
    for _ in range(2):
        assert ran(train, *sweep).returncode == 0
        states = {each.name: record.read(each).state for each in (tmp_path / "sweep").iterdir() if each.is_dir()}
        assert states == {"0": record.INFEASIBLE, "1": record.OK}
    rows = {row["strategy"]: row for row in csv.DictReader((tmp_path / "sweep/table.csv").open())}
    assert rows["dp"]["status"] == "infeasible" and "MiB" in rows["dp"]["reason"] and rows["fsdp"]["status"] == "ok"
    assert ran(train, "strategy=dp", f"hydra.run.dir={tmp_path}/alone").returncode == 1
    assert ran(train, "-m", "strategy=dp", f"hydra.sweep.dir={tmp_path}/all").returncode == 1

    given = f"profile.path={tmp_path}/sweep/1/profile.json"
    plans = ran(plan, "-m", given, "strategy=dp,fsdp", "plan.format=json", f"hydra.sweep.dir={tmp_path}/plans")
    assert plans.returncode == 0, plans.stderr
    document = json.loads(plans.stdout)
    assert [each["strategy"] for each in document["plans"]] == ["fsdp"]
    assert ["strategy=dp" in each["overrides"] for each in document["infeasible"]] == [True]

    few = ("curve.shares=3", "curve.budgets=[floor+30%]")
    assert ran(curve, given, "strategy=dp,fsdp", *few, f"hydra.run.dir={tmp_path}/curve").returncode == 0
    points = json.loads((tmp_path / "curve/curve.json").read_text())["points"]
    assert {each["strategy"]: each["predicted"] is None for each in points} == {"dp": True, "fsdp": False}

    rounds = ("compare.rounds=1", f"hydra.run.dir={tmp_path}/compare")
    compared = ran(compare, given, "strategy=dp,fsdp", *rounds)
    assert compared.returncode == 0, compared.stderr
    document = json.loads((tmp_path / "compare/comparison.json").read_text())
    [part] = document["budgets"]
    assert [each["name"] for each in document["candidates"]] == ["fsdp"] and part["infeasible"]["dp"] > part["budget_bytes"]
    [row] = [line for line in compared.stdout.splitlines() if line.startswith("  dp ")]
    assert "does not fit" in row
