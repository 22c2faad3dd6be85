"""`plan.py` shows a plan and why it is as it is; with -m a row for every plan."""

import io
import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import plan as program
from experiments import profile
from experiments.explain import UnitChoice
from experiments.job.arguments import help_text
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan, unsharded_bytes
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Greedy, Uniform
from mdcs.profile.schema import Profile
from tests.experiments import one_process
from tests.mdcs.profiles import recomputable

PATH = Path(__file__).with_name("profile.json")
PROFILE = Profile.from_json(PATH.read_text())


def test_a_plan_is_shown_with_its_units_prediction_bounds_and_memory():
    console = Console(width=120, record=True, file=io.StringIO())
    made = make_plan(PROFILE, Uniform("dp"), Wfbp(), budget=10**6)
    program.show(made, console)
    shown = console.export_text()
    assert "embed" in shown and "block" in shown
    assert "1 AR" in shown
    assert "step ms" in shown
    assert "no plan within the budget is faster than" in shown
    assert "floor: smallest feasible" in shown
    assert f"{10**6 / 2**20:.2f}" in shown


def test_what_recomputation_frees_and_costs_is_said_in_words_and_in_numbers():
    console = Console(width=200, record=True, file=io.StringIO())
    made = make_plan(recomputable(PROFILE, 1, freed=2**20, seconds=0.002), Uniform("dp"), Wfbp(), recompute="all")
    program.show(made, console)
    assert "1 of 2 units recompute their activations: 1.0 MiB fewer, 2.0 ms more per step" in console.export_text()
    assert program.told(made)["recomputed"] == {"units": 1, "frees_bytes": 2**20, "costs_s": 0.002}


def test_units_that_are_alike_are_one_row(monkeypatch):
    monkeypatch.setattr(program, "_MANY", 3)
    last = UnitChoice("head", 10, "fsdp", "none", {"RS": 1}, "sdp", 0, 0.001)
    blocks = [UnitChoice(f"h.{i}", 10, "fsdp", "none", {"RS": 1}, "sdp", 0, 0.001 + 1e-9 * i) for i in range(5)]
    blocks[3] = replace(blocks[3], strategy="dp")  # … and two that are too few
    table = program.units_table(make_plan(PROFILE, Uniform("fsdp"), Wfbp()), [*blocks, last])
    assert list(table.columns[0].cells) == ["h.0 … h.2 (3 alike)", "h.3", "h.4", "head"]


def test_the_document_has_what_is_shown():
    made = make_plan(PROFILE, Greedy(), Wfbp(), budget=10**6)
    document = json.loads(json.dumps(program.document(made)))
    assert (document["schema"], document["plan"], document["budget_bytes"]) == (2, made.hash, 10**6)
    assert [u["unit"] for u in document["units"]] == [u.name for u in PROFILE.units]
    assert document["predicted"]["step_s"] >= document["bounds"]["structural_s"] >= document["bounds"]["traffic_s"]
    assert document["binding_slot"]["bytes"] == document["predicted"]["peak_bytes"]


def test_json_is_all_that_is_printed(tmp_path):
    asked = ("plan.format=json", "strategy=dp", "hydra.run.dir=out")
    done = one_process.call(program, tmp_path, *asked, worker="tests.experiments.stub_worker")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["plan"] == Plan.from_json((tmp_path / "out/plan.json").read_text()).hash


def test_a_file_may_ask_for_json(tmp_path):
    """The plan of a sweep, too, whose jobs Hydra would announce on stdout."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/mine.yaml").write_text("defaults: [config, _self_]\nplan:\n  format: json\n")
    asked = ("--config-dir=own", "--config-name=mine", "-m", "strategy=dp,fsdp", "hydra.sweep.dir=out")
    done = one_process.call(program, tmp_path, *asked, worker="tests.experiments.stub_worker")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["plans"]) == 2


JOB = ("model=mlp", "data=digits", "optimizer=sgd", "optimizer.momentum=0", f"profile.path={PATH}", "hydra.sweep.dir=out")


def test_a_sweep_of_plans_is_a_row_for_each(tmp_path):
    done = one_process.call(program, tmp_path, "plan.format=json", "-m", "strategy=dp,zero2,stratgy", *JOB)
    assert done.returncode == 1 and "strategy: no such option stratgy" in done.stderr
    plans = json.loads(done.stdout)["plans"]
    assert [plan["strategy"] for plan in plans] == ["dp", "zero2"]
    for number, told in enumerate(plans):
        made = Plan.from_json((tmp_path / f"out/{number}/plan.json").read_text())
        assert made.hash == told["plan"] and made.prediction.step_s == told["predicted"]["step_s"]


def test_a_sweep_of_plans_has_a_column_for_each_setting_that_it_varies(tmp_path):
    sweep = ("-m", "strategy=dp", "scheduler=fusion", "scheduler.bucket_mib=0.1,25", "budget=1GiB")
    done = one_process.call(program, tmp_path, *sweep, *JOB)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert any(line[:3] == ["strategy", "scheduler", "bucket_mib"] for line in lines)
    assert [line[2] for line in lines if line[:2] == ["dp", "fusion"]] == ["0.1", "25"]


def test_a_sweep_has_a_list_of_budgets_in_words(tmp_path):
    grid = ("-m", "strategy=dp", "budget=1GiB,300% of ddp,floor+300%,none", *JOB)
    done = one_process.call(program, tmp_path, "plan.format=json", *grid)
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)["plans"]
    size, share, over, none = (plan["budget_bytes"] for plan in plans)
    whole = unsharded_bytes(PROFILE)
    assert (size, share, over, none) == (1 << 30, 3 * whole, 4 * plans[0]["floor_bytes"], None)


def test_a_program_of_one_job_takes_no_sweep(tmp_path):
    done = one_process.call(profile, tmp_path, "-m", "strategy=dp", "hydra.sweep.dir=out")
    assert (done.returncode, done.stderr) == (2, "--multirun: this program takes one job\n")


BATCHES = ("strategy=dp", *JOB, "budget=2e-5GiB")


def test_the_batches_that_fit_are_a_table_before_the_plan(tmp_path):
    done = one_process.call(program, tmp_path, *BATCHES, "batch.find=fastest", "hydra.run.dir=out")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert any("batches per rank within 0.0 MiB, from profiles of 4" in " ".join(line) for line in lines)
    assert ["batch", "samples/s", "step", "ms", "exposed", "ms", "recomputing", "peak", "MiB"] in lines
    assert any(line[-2:] == ["largest,", "fastest"] for line in lines)
    assert (tmp_path / "out/plan.json").exists() and not (tmp_path / "out/fastest").exists()


def test_a_sweep_over_what_is_found_has_a_column_for_the_batch(tmp_path):
    grid = ("-m", *BATCHES, "batch.find=largest", "budget=1.5e-5GiB,2e-5GiB")
    done = one_process.call(program, tmp_path, "plan.format=json", *grid)
    assert done.returncode == 0, done.stderr
    small, large = json.loads(done.stdout)["plans"]
    assert 1 < small["batch"] < large["batch"] and small["samples_per_s"] > 0
    table = one_process.call(program, tmp_path, *grid).stdout
    assert "batch   samples/s" in table


def test_a_launcher_that_would_copy_the_jobs_into_its_processes_is_refused(tmp_path, monkeypatch):
    def refuse(composed):
        raise pickle.PicklingError("Could not pickle the task to send it to the workers.")

    monkeypatch.setattr("experiments.job.app.hydra.main", lambda **_: lambda task: lambda: refuse(task))
    done = one_process.call(program, tmp_path, "-m", "strategy=dp,fsdp")
    assert done.returncode == 2 and done.stderr.startswith("hydra/launcher: jobs of one machine run one after the other, ")


@pytest.mark.parametrize("flags", [("--config-dir", "{}", "--config-name", "mine"), ("--config-dir={}", "-cn", "mine.yaml")])
def test_help_begins_with_the_config_that_a_command_line_names(tmp_path, flags):
    (tmp_path / "mine.yaml").write_text("defaults: [config, override data: synthetic, _self_]\nrun: {steps: 7}\n")
    said = help_text("", [flag.format(tmp_path) for flag in flags])
    assert "run.steps=7 " in said and "data=synthetic* " in said


def test_help_has_the_keys_of_this_program_and_not_of_others():
    said = help_text("", [], ("plan",))
    assert "plan.format=text" in said and "run.steps=30" in said and "compare.rounds" not in said
