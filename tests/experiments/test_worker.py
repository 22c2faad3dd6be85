"""Real jobs on two real ranks: every strategy and scheduler trains the same, sends what its plan says, and holds the
bytes that the ledger says. And what happens when a rank dies, raises, hangs, or has another plan.

Starting ranks costs seconds, so the jobs that end well, or are refused before step 1, share one start.
"""

import dataclasses
import io
import itertools
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import analysis
from analysis.events import read_events
from experiments.config import checks, files
from experiments.config.schema import ProfileConfig
from experiments.job import record
from launch import preemption, status
from launch.elastic import Warm
from mdcs.plan.plan import Plan
from mdcs.profile.link import Collectives, Kind
from mdcs.telemetry.timeline import PREDICTED_RANK, Timeline
from tests.experiments.batch import composed, run_all, run_job
from tests.launch.processes import assert_gone

STEPS, WARMUP = 4, 2
SMALL = (f"run.steps={STEPS}", f"run.unmeasured_steps={WARMUP}", "run.profile_iterations=2", "cluster.threads=1")
SHARE = ("budget=floor+10%", "budget.schedule_share=0.5")

WORKLOADS = {
    "tied gpt2": ("model=gpt2-tiny", "data=stdlib_bytes", "optimizer=adam", "run.eval_every=2"),
    "clipped bert": (
        *("model=bert-tiny", "data=synthetic", "optimizer=adamw", "optimizer.clip_norm=0.5"),
        *("optimizer.schedule=cosine", "run.accumulation=2", "model.checkpointing=true"),
    ),
    "resnet by size": ("model=resnet-tiny", "data=synthetic", "optimizer=sgd", "model.wrap=size",
                       "model.wrap_min_params=2000", "run.eval_every=3"),
    "pairs": ("model=bert-tiny-pairs", "data=nli", "optimizer=adam", "run.eval_every=2"),
    "mlp": ("model=mlp", "data=auto", "optimizer=adam"),
    "llama": ("model=llama-tiny", "data=synthetic", "optimizer=adam"),
    "vit": ("model=vit-tiny", "data=synthetic", "optimizer=adam"),
    "gpt2 that recomputes": ("model=gpt2-tiny", "data=stdlib_bytes", "optimizer=adam"),
    "frozen fp64 mlp": ("model=mlp", "model.width=64", "data=digits", "optimizer=adam", "model.wrap=leaf",
                        "model.frozen=[linear1.*]", "run.precision=fp64", "run.accumulation=2"),
}  # fmt: skip
# The first of each workload measures the profile that the others plan with.
JOBS = [
    ("tied gpt2", ("strategy=dp", "scheduler=sequential")),
    ("tied gpt2", ("strategy=greedy", "scheduler=priority", *SHARE)),
    ("tied gpt2", ("strategy=fsdp", "scheduler=dear", "link=emulated", "collectives=ring")),
    ("tied gpt2", ("strategy=random", "scheduler=random", "link=emulated", "link.depth=1", "collectives=native")),
    ("clipped bert", ("strategy=zero2", "scheduler=mg_wfbp")),
    ("clipped bert", ("strategy=ilp", "scheduler=fusion", *SHARE)),
    ("clipped bert", ("strategy=sdp", "scheduler=partitioning", "scheduler.block_mib=0.05", "link=emulated")),
    ("resnet by size", ("strategy=sdp", "scheduler=wfbp")),
    ("resnet by size", ("strategy=joint", "strategy.seconds=1", "budget=floor+20%")),
    ("resnet by size", ("strategy=fsdp", "scheduler=random", "link=emulated")),
    ("resnet by size", ("strategy=dp", "scheduler=priority", "scheduler.block_mib=0.02", "budget=none")),
    ("pairs", ("strategy=dp", "scheduler=sequential")),
    ("pairs", ("strategy=fsdp", "scheduler=priority", "link=emulated")),
    ("frozen fp64 mlp", ("strategy=zero2", "scheduler=priority", "run.cross_iteration=false")),
    ("frozen fp64 mlp", ("strategy=fsdp", "scheduler=wfbp", "budget=0.5GiB", "budget.reserve_mib=1")),
    ("frozen fp64 mlp", ("strategy=sdp", "scheduler=memory_aware", "scheduler.seconds=1", "link=emulated")),
    *((model, plan) for model in ("mlp", "llama", "vit")
      for plan in (("strategy=dp", "scheduler=sequential"), ("strategy=fsdp", "scheduler=dear"))),
    *(("gpt2 that recomputes", (f"recompute={choice}",)) for choice in ("all", "none", "planned", "random", "selective")),
]  # fmt: skip
ELSEWHERE = {
    "cluster": {"cuda", "shaped", "emulated"},  # test_shaped.py, test_emulated.py
    "strategy": {"hsdp_no_reshard", "hsdp"},  # test_shaped.py: they need nodes
    "tracker": {"wandb", "tensorboard"},
    "data": {"multi_nli", "text", "own"},  # on the hub; test_data.py; test_own_model.py
    "optimizer": {"own"},  # test_own.py
    "model": {"gpt2-small", "gpt2-small-bytes", "gpt2-medium", "gpt2-xl", "bert-base", "bert-base-pairs", "llama-1b", "vit-base",
              "resnet50", "resnet152",  # the small ones are of the same classes
              "timed", "own"},  # test_engines.py; test_own_model.py
}
DEFAULTS = {"link=real", "collectives=auto", "cluster=local", "tracker=none", "recompute=auto"}
REFUSED = {
    "infeasible": ("model=mlp", "data=digits", "budget=1e-6GiB"),
    "infeasible for dp": ("model=mlp", "data=digits", "strategy=dp", "budget=floor+0%"),
    "another plan": ("model=mlp", "data=digits"),
    "pattern of no parameter": ("model=mlp", "model.frozen=[layer.*]", "data=digits"),
}


@dataclasses.dataclass(frozen=True)
class Ran:
    """The folder of a job that ended well."""

    workload: str
    overrides: tuple[str, ...]
    folder: Path

    @property
    def events(self):
        return read_events(self.folder / "metrics.jsonl")

    @property
    def start(self):
        """Return the request and the plan."""
        return self.events[0] | self.events[1]

    @property
    def summary(self):
        return self.events[-1]

    @property
    def steps(self):
        return [event for event in self.events if event["event"] == "step"]

    @property
    def plan(self):
        return Plan.from_json((self.folder / "plan.json").read_text())

    def timeline(self, name):
        return Timeline.from_json((self.folder / name).read_text())


@pytest.fixture(scope="module", params=[pytest.param("two ranks", marks=pytest.mark.slow)])
def batch(tmp_path_factory, warm):
    """All jobs of JOBS and REFUSED, run by the same two ranks."""
    folder = tmp_path_factory.mktemp("batch")
    first: dict[str, Path] = {}
    configs = {}
    jobs_of = [(str(n), workload, (*WORKLOADS[workload], *overrides)) for n, (workload, overrides) in enumerate(JOBS)]
    refused = [(name, str(overrides[:2]), (*overrides, f"run.name={name}")) for name, overrides in REFUSED.items()]
    with checks.composing():
        for name, workload, overrides in [*jobs_of, *refused]:
            config, own = checks.compose_config([*SMALL, *overrides]), folder / name
            profile = first.setdefault(workload, own / "profile.json")
            if profile.parent != own:
                config = dataclasses.replace(config, profile=ProfileConfig(path=str(profile)))
            configs[name] = config
    run_all(folder, configs, warm)
    return folder


@pytest.fixture(scope="module")
def ran(batch):
    return [Ran(workload, overrides, batch / str(n)) for n, (workload, overrides) in enumerate(JOBS)]


def test_every_option_has_a_job():
    named = {override for workload, overrides in JOBS for override in (*WORKLOADS[workload], *overrides)} | DEFAULTS
    elsewhere = {f"{group}={option}" for group, options in ELSEWHERE.items() for option in options}
    every = {f"{group}={option}" for group, options in files.groups().items() for option in options
             if group not in ("experiment", "compare", "paths", "debug", "engine")}  # fmt: skip
    assert every - named - elsewhere == set()


def test_a_job_says_what_it_does_step_by_step(ran):
    for run in ran:
        names = [event["event"] for event in run.events if event["event"] != "eval"]
        assert names == ["job", "start", *["step"] * STEPS, "summary"], run
        assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
        assert [step["warmup"] for step in run.steps] == [n <= WARMUP for n in range(1, STEPS + 1)]
        for step in run.steps:
            assert step["step_s"] >= step["compute_s"] > 0 and 0 <= step["overlap_ratio"] <= 1, run
            assert step["stalled_s"] == pytest.approx(step["step_s"] - step["compute_s"]), run
            assert step["exposed_s"] == pytest.approx(step["communication_s"] - step["overlap_s"]), run
            assert step["idle_s"] == pytest.approx(step["stalled_s"] - step["exposed_s"]) and step["idle_s"] >= 0, run
        assert (run.summary["status"], run.summary["steps"]) == ("ok", STEPS)
        assert run.summary["loss"] == pytest.approx(run.steps[-1]["loss"], rel=0.5)  # which is rank 0's
        assert run.summary["loss"] != run.steps[-1]["loss"], run
        evaluated = [event["step"] for event in run.events if event["event"] == "eval"]
        every = {"tied gpt2": 2, "pairs": 2, "resnet by size": 3}.get(run.workload, STEPS + 1)
        assert evaluated == list(range(every, STEPS + 1, every))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_losses_do_not_depend_on_strategy_schedule_link_or_budget(ran, workload):
    """Two ranks sum two numbers: whatever the plan, the bits are the same, those of a clipped norm included."""
    curves = [
        [(event["event"], event["step"], event["loss"]) for event in run.events if "loss" in event and "step" in event]
        for run in ran
        if run.workload == workload
    ]
    assert len(curves) >= 2
    for curve in curves[1:]:
        assert [point[:2] for point in curve] == [point[:2] for point in curves[0]]
        assert [point[2] for point in curve] == [point[2] for point in curves[0]]
    losses = [loss for event, _, loss in curves[0] if event == "step"]
    assert len(set(losses)) == STEPS  # it does train


def test_every_step_sends_what_the_plan_says(ran):
    for run in ran:
        plan = run.plan
        count = Counter(str(message.kind) for message in plan.messages)
        for step in run.steps[:-1]:
            assert step["bytes"] == plan.sent_bytes(), run
            assert step["messages"] == count, run
        planned = plan.sent_bytes()  # no forward follows the last step, and what it needs is not sent
        assert all(size <= planned[kind] for kind, size in run.steps[-1]["bytes"].items()), run
        assert run.summary["bytes"] == plan.sent_bytes()
        assert run.start["plan_hash"] == plan.hash


def test_memory_is_what_the_ledger_says_to_the_byte(ran):
    """Registered buffers exactly; activations were measured by the profile, in another iteration."""
    for run in ran:
        ledger, measured = run.summary["memory"]["ledger"], run.summary["memory"]["measured"]
        differences = {
            category: (ledger[category], measured[category])
            for category in ledger
            if category not in ("activations", "total") and ledger[category] != measured[category]
        }
        if run.plan.profile.collectives.algorithm == "native" and "staging" in differences:
            # The backend's own threads allocate it, when they come to a message: those of two in flight need not meet.
            booked, held = differences.pop("staging")
            assert 0 < held < booked, run
        assert differences == {}, run
        assert measured["activations"] <= ledger["activations"] + 64, run
        assert measured["total"] <= ledger["total"] + 64, run
        assert run.summary["memory"]["predicted"] == dataclasses.asdict(run.plan.prediction)["memory"]


def test_a_budget_is_kept(ran):
    with_budget = [run for run in ran if run.start["budget_bytes"] is not None]
    assert len(with_budget) >= 4
    for run in with_budget:
        allowed = run.plan.admissible
        assert run.start["floor_bytes"] <= allowed + run.plan.reserve <= run.start["budget_bytes"] == run.plan.budget
        assert run.summary["memory"]["measured"]["total"] <= allowed, run
        assert all(step["peak_bytes"] <= allowed for step in run.steps), run


def test_timelines_show_a_whole_period_of_every_rank(ran):
    for run in ran:
        plan = run.plan
        slots = tuple(plan.period.name(slot) for slot in range(plan.period.length))
        for name, ranks in (("timeline.json", [0, 1]), ("predicted_timeline.json", [PREDICTED_RANK])):
            timeline = run.timeline(name)
            assert timeline.slots == slots
            assert [rank.rank for rank in timeline.ranks] == ranks
            assert [memory.slot for memory in timeline.memory] == list(slots)
            for rank in timeline.ranks:
                computed = [interval for interval in rank.intervals if interval.lane == "compute"]
                assert [interval.name for interval in computed] == list(slots), run
                assert all(a.end <= b.start for a, b in itertools.pairwise(computed)), run
                sent = Counter(interval.kind for interval in rank.intervals if interval.lane == "message")
                # A message that is in flight at an end of the period is there at both. What is sent near an end, and what is
                # gathered ahead for backward, may, as times vary, come just before this period and just after it.
                missing = Counter(str(message.kind) for message in plan.messages) - sent
                ahead = sum(m.kind is Kind.AG_B and m.slot < plan.period.turn for m in plan.messages)
                most = 0 if ranks == [PREDICTED_RANK] else plan.profile.link.depth + ahead
                assert sum(missing.values()) <= most, (run, missing)
        assert run.timeline("predicted_timeline.json").period_s == pytest.approx(plan.prediction.step_s)


def test_a_link_is_emulated_when_the_config_says_so(ran):
    for run in ran:
        emulated = "link=emulated" in run.overrides
        assert run.start["emulated"] is emulated
        if emulated:  # 1 Gbit/s carries no more, whatever the schedule
            at_least = sum(run.plan.sent_bytes().values()) * 8 / 1e9
            assert run.summary["communication_s"] > at_least, run
            assert run.plan.profile.link.depth == (1 if "link.depth=1" in run.overrides else 2)


def test_messages_are_carried_as_the_config_says(ran):
    """The default on an emulated link; on a real one what was measured to be the fastest."""
    for run in ran:
        named = next((o.partition("=")[2] for o in run.overrides if o.startswith("collectives=")), None)
        wanted = Collectives(named or "ring")
        chosen = run.plan.profile.collectives
        assert chosen == wanted or "link=emulated" not in run.overrides, run
        assert run.start["collectives"] == str(chosen)


def test_the_table_and_the_pictures_of_real_runs(batch, ran, tmp_path):
    frame = analysis.runs(batch)
    statuses = Counter(frame["status"])
    assert statuses["ok"] == len(JOBS) and statuses.total() <= len(JOBS) + len(REFUSED)
    printed = io.StringIO()
    analysis.print_table(frame, printed)
    for run in ran:
        assert run.start["strategy"] in printed.getvalue() and run.start["scheduler"] in printed.getvalue()
    written = {path.name for path in analysis.write_report(analysis.runs(ran[1].folder), tmp_path)}
    assert {"table.csv", "tradeoff.png", "timeline.png", "memory.png", "trace.json"} <= written


# ---- what is refused before step 1


def refusal(batch: Path, name: str) -> str:
    """The reason, which all ranks give."""
    said = {(batch / name / f"refused{rank}").read_text() for rank in (0, 1)}
    metrics = batch / name / "metrics.jsonl"
    assert [event["event"] for event in read_events(metrics)] in (["job"], ["job", "start"])
    return said.pop() if len(said) == 1 else " / ".join(sorted(said))


def test_an_infeasible_budget_names_the_smallest_feasible_one(batch):
    last = read_events(batch / "infeasible/metrics.jsonl")[-1]
    assert last["status"] == "infeasible" and "does not fit 1.1 KiB" in last["reason"]
    assert "the smallest budget is" in last["reason"] and last["reason"].endswith("iB")
    assert "strategy dp does not fit" in read_events(batch / "infeasible for dp/metrics.jsonl")[-1]["reason"]


def test_a_rank_with_another_plan_is_named(batch):
    assert "rank 1, before step 1: rank 1 has another plan (" in refusal(batch, "another plan")


def test_a_pattern_that_freezes_nothing_is_refused(batch):
    assert refusal(batch, "pattern of no parameter") == "ValueError: model.frozen: 'layer.*' matches no parameter"


# ---- what goes wrong later


def start_and(folder: Path, *overrides: str, act=lambda pids: None, **options):
    """Run a job, call `act` with the ranks' pids once both are at step 3, and return (outcome, its pids)."""
    config = composed(*SMALL, "model=mlp", "model.width=32", "data=synthetic", "run.steps=100000", *overrides)
    pids: list[int] = []

    def watch() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not pids:
            said = [status.read(folder, rank) for rank in (0, 1)]
            if all(each is not None and each.step >= 3 for each in said):
                pids.extend(each.pid for each in said if each is not None)
                act(pids)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    outcome = run_job(config, folder, **options)
    watcher.join()
    return outcome, pids


def assert_over(folder: Path, pids: list[int]) -> list[dict]:
    """No rank runs, and what was measured can be read; returns the events."""
    assert len(pids) == 2
    assert_gone(pids)
    events = read_events(folder / "metrics.jsonl")
    assert [event["event"] for event in events[:3]] == ["job", "start", "step"]
    assert events[-1]["event"] == "failure"
    row = analysis.load_run(folder).row()
    assert row["status"] == "failed" and row["steps"] >= 1
    return events


@pytest.mark.slow
def test_a_killed_rank_ends_the_job(tmp_path):
    plan = ("strategy=fsdp", "scheduler=dear", "cluster.timeout_s=20")
    outcome, pids = start_and(tmp_path, *plan, act=lambda pids: os.kill(pids[1], signal.SIGKILL))
    failure = assert_over(tmp_path, pids)[-1]
    assert not outcome.ok and (outcome.rank, failure["rank"]) == (1, 1)
    assert outcome.reason == f"rank 1 was killed by SIGKILL at step {outcome.step}"
    assert outcome.step >= 3


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_job(tmp_path, warm):
    plan = ("strategy=zero2", "scheduler=priority", "cluster.timeout_s=20")
    outcome, pids = start_and(tmp_path, *plan, worker="tests.experiments.faulty_worker", start=warm.run)
    failure = assert_over(tmp_path, pids)[-1]
    assert (outcome.rank, outcome.step, failure["step"]) == (1, 3, 3)
    reason = "rank 1 failed at step 3: ZeroDivisionError: the test fails in backward, as told"
    assert failure["reason"] == outcome.reason == reason
    assert "in fail\n" in (tmp_path / "rank1.log").read_text()  # the traceback


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_job(tmp_path, warm):
    plan = ("strategy=sdp", "scheduler=wfbp", "cluster.timeout_s=5")
    outcome, pids = start_and(tmp_path, *plan, act=lambda pids: os.kill(pids[1], signal.SIGSTOP), start=warm.run)
    assert_over(tmp_path, pids)
    assert not outcome.ok and "step" in outcome.reason and "rank" in outcome.reason


# ---- a job that is told to stop, without SLURM: one rank hears it, all write a checkpoint of one step, and it goes on there


@pytest.fixture
def requeued(monkeypatch):
    """A process of this test's own: the ranks that it forks have its environment."""
    monkeypatch.setenv(preemption.REQUEUE, "1")
    with Warm() as started:
        yield started


@pytest.mark.slow
def test_all_ranks_stop_at_one_step_and_go_on_after_it(tmp_path, requeued):
    plan = ("strategy=fsdp", "scheduler=dear", "cluster.timeout_s=60")
    outcome, _ = start_and(tmp_path, *plan, act=lambda pids: os.kill(pids[1], signal.SIGUSR2), start=requeued.run)
    stopped = outcome.step
    assert outcome.reason == f"preempted at step {stopped}, of which it has a checkpoint" and stopped >= 3
    assert record.read(tmp_path).state == record.PREEMPTED
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{stopped:08d}"]

    more = ("model=mlp", "model.width=32", "data=synthetic", f"run.steps={stopped + 4}", "run.resume=auto", *plan)
    assert run_job(composed(*SMALL, *more), tmp_path, start=requeued.run).ok
    events = read_events(tmp_path / "metrics.jsonl")
    steps = [event["step"] for event in events if event["event"] == "step"]
    assert steps == list(range(1, stopped + 5))
    assert record.read(tmp_path).state == record.OK
