"""Jobs of one process that is a rank of many: they say so wherever a result is shown, and claim no losses."""

import dataclasses
import io
import math

import pytest

import analysis
from analysis.events import read_events
from experiments.config.schema import ConfigError
from experiments.explain import choices
from experiments.job import run as jobs
from experiments.job.events import job_event
from experiments.job.resolved import resolve
from experiments.plan import units_table
from experiments.profile import units_table as profile_table
from mdcs.plan.plan import Plan
from mdcs.telemetry.timeline import Timeline
from tests.experiments.batch import composed, run_all

pytestmark = pytest.mark.slow

SMALL = ("run.steps=5", "run.unmeasured_steps=2", "run.profile_iterations=2", "cluster.threads=1")
EMULATED = ("cluster=emulated", "link=emulated", "link.rate_gbit=10")
MODEL = ("model=mlp", "data=digits", "data.batch_size=2")
JOBS = {
    "of 64": (*MODEL, "strategy=fsdp", "scheduler=dear", "run.accumulation=2"),
    "of 8": (*MODEL, "strategy=greedy", "scheduler=priority", "budget=floor+10%", "optimizer.clip_norm=1",
             "cluster.ranks=8", "cluster.rank=5"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory, warm):
    """The folders of all jobs, which one process has run one after the other."""
    folder = tmp_path_factory.mktemp("emulated")
    run_all(folder, {name: composed(*SMALL, *EMULATED, *overrides) for name, overrides in JOBS.items()}, warm)
    return {name: folder / name for name in JOBS}


@pytest.mark.parametrize(("job", "world", "rank"), [("of 64", 64, 0), ("of 8", 8, 5)])
def test_a_job_says_that_its_ranks_are_emulated_and_nothing_of_losses(folders, job, world, rank):
    asked, start, *steps, summary = read_events(folders[job] / "metrics.jsonl")
    assert (asked["emulated_ranks"], start["emulated"], asked["world"], start["world"]) == (True, True, world, world)
    assert asked["name"].endswith(f" (rank {rank} of {world}, emulated)")
    assert summary["emulated_ranks"] is True and summary["status"] == "ok"
    assert [step["loss"] for step in (*steps, summary)] == [None] * 6
    assert all(step.get("grad_norm") is None for step in steps)
    [measured] = Timeline.from_json((folders[job] / "timeline.json").read_text()).ranks
    assert measured.rank == rank and {i.lane for i in measured.intervals} == {"compute", "message", "update"}


@pytest.mark.parametrize("job", JOBS)
def test_its_memory_is_the_ledger_s_to_the_byte(folders, job):
    _, start, *_, summary = read_events(folders[job] / "metrics.jsonl")
    ledger, measured = summary["memory"]["ledger"], summary["memory"]["measured"]
    buffers = ledger.keys() - {"activations", "total"}
    assert {c: ledger[c] for c in buffers} == {c: measured[c] for c in buffers}
    assert measured["total"] <= ledger["total"] + 64
    assert start["budget_bytes"] is None or measured["total"] <= start["budget_bytes"]


def test_tables_and_pictures_say_so(folders):
    frame = analysis.table_of([analysis.load_run(folder).row() for folder in folders.values()])
    assert frame["emulated_ranks"].all() and all(math.isnan(loss) for loss in frame["loss"])
    printed = io.StringIO()
    analysis.print_table(frame, printed)
    assert "· 64 emulated ranks · emulated link of 10 Gbit/s" in printed.getvalue()
    assert "· 8 emulated ranks · emulated link of 10 Gbit/s" in printed.getvalue()
    plan = Plan.from_json((folders["of 64"] / "plan.json").read_text())
    for table in (units_table(plan, choices(plan)), profile_table(plan.profile)):
        assert "64 emulated ranks" in str(table.title)


def test_a_job_says_so_before_it_has_a_plan(tmp_path):
    jobs.begin(config := resolve(composed(*EMULATED)), tmp_path, job_event(config))
    assert analysis.load_run(tmp_path).row()["emulated_ranks"] is True


def test_one_process_has_all_cores_and_is_all_that_is_started(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    cluster = dataclasses.replace(composed(*EMULATED).cluster, threads=None)
    assert (cluster.ranks, cluster.processes, cluster.resolved_threads()) == (64, 1, 8)


WRONG = {
    "link=real": "link.name: must be emulated with cluster=emulated, which sends nothing; got real",
    "cluster.ranks=8 cluster.rank=8": "cluster.rank: must be < cluster.ranks=8, got 8",
    "cluster=local cluster.rank=1": "cluster.rank: has no effect with cluster.name=local, got 1",
    "run.eval_every=2": "run.eval_every: must be null with cluster=emulated, without losses; got 2",
    "run.resume=auto": "run.resume: must be null with cluster=emulated, whose weights mean nothing; got auto",
    "link.rate_gbit=null": "link.rate_gbit: is needed with link.name=emulated, got null",
}


@pytest.mark.parametrize(("overrides", "message"), WRONG.items(), ids=WRONG)
def test_a_wrong_value_is_one_line_with_its_key(overrides, message):
    with pytest.raises(ConfigError) as caught:
        given = [o for o in EMULATED if not (overrides == "link=real" and o.startswith("link"))]
        composed(*given, *overrides.split())
    assert str(caught.value) == message
