"""`mdcs compare`: who takes turns, what is asked of whom, and what is said in the end. The runs are made up."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import yaml

import mdcs
from analysis import pictures
from analysis.events import METRICS
from experiments import compare
from experiments.config.checks import compose_config, composing
from experiments.config.files import CONF, groups
from experiments.explain import Bounds
from experiments.job import run as jobs
from experiments.job.events import job_event, start_event
from experiments.job.tracking import JsonLines
from launch.elastic import Outcome
from mdcs.planner.schedulers import Dear
from mdcs.planner.strategies import Uniform
from tests.experiments import one_process
from tests.mdcs.profiles import recomputable

PROFILE = Path(__file__).with_name("profile.json")
MIB = 2**20
BOUNDS = Bounds(0.05, 0.08, None)
COMMON = ("model=mlp", "data=digits", "run.steps=3", "run.unmeasured_steps=1")
STEP_S = {"mdcs": 0.1, "ddp": 0.15, "fsdp2": 0.4, "fairscale": 0.2}
PEAK_MIB = {"mdcs": 1, "ddp": 8, "fsdp2": 1, "fairscale": 8}


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """No rank is started: a run is what is written for it. Returns the calls, and what may go wrong by name."""
    calls, wrong = [], {}
    profile = mdcs.Profile.from_json(PROFILE.read_text())
    plan = mdcs.make_plan(profile, Uniform("zero2"), Dear(bucket_mib=1.0))

    def run(config, folder, console, *, known, only=None, kind="train"):
        folder.mkdir(parents=True, exist_ok=True)
        name = config.engine.name
        if only == "profile":
            (folder / "profile.json").write_text(PROFILE.read_text())
            return Outcome(True)
        calls.append(config)
        if len(calls) == wrong.get("interrupted at"):
            raise KeyboardInterrupt
        if wrong.get(name) == "fails":
            return Outcome(False, "rank 1 was killed")
        if name == "mdcs":
            (folder / "plan.json").write_text(plan.to_json())
        with JsonLines(folder / METRICS) as metrics:
            metrics.write(job_event(config))
            if name == "mdcs":
                metrics.write(start_event(config, plan, 1000))
            for step in (1, 2, 3):
                off = 0.5 if wrong.get(name) == "differs" else 0
                told = {"step": step, "warmup": step == 1, "loss": 1 / step + off, "step_s": STEP_S[name]}
                metrics.write({"event": "step", **told})
            spread = dict.fromkeys(("median", "p10", "p90"), STEP_S[name])
            metrics.write({"event": "summary", "status": "ok", "step_s": spread, "peak_bytes": PEAK_MIB[name] * MIB})
        return Outcome(True)

    monkeypatch.setattr(jobs, "run", run)
    monkeypatch.setattr(compare, "bounds_of", lambda plan, seconds: BOUNDS)
    monkeypatch.setattr(compare, "pictures", mock.MagicMock())  # to draw them takes as long as all else
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(calls=calls, wrong=wrong)


CANDIDATES = yaml.safe_load((CONF / "compare/engines.yaml").read_text())["vary"]


def only(*names):
    return f"compare.only=[{','.join(('mdcs', *names))}]"


def asked(*arguments, common=COMMON):
    return one_process.call(compare, Path.cwd(), "hydra.run.dir=results/compare", *arguments, *common)


def test_engines_take_turns_and_every_budget_has_a_run_of_mdcs(ranks, monkeypatch):
    monkeypatch.setattr(compare, "pictures", pictures)
    lists = "engine=mdcs,ddp,fsdp2", "budget=floor+50%,none"
    assert (done := asked("compare.rounds=2", *lists, "strategy=greedy")).returncode == 0
    names = [(config.engine.name, config.budget.limit) for config in ranks.calls]
    first = [("mdcs", "floor+50%"), ("mdcs", "none"), ("ddp", "none"), ("fsdp2", "none")]
    assert names == [*first, *first[1:], first[0]]
    assert {config.strategy.name for config in ranks.calls if config.engine.name == "mdcs"} == {"greedy"}
    printed = done.stdout
    limited, unlimited = printed.split("no limit")
    assert "budget 0.0 MiB (floor+50%)" in limited
    beyond = [line.split() for line in limited.splitlines() if "does not fit" in line]
    assert [(each[0], each[-1]) for each in beyond] == [("mdcs", "1.0"), ("ddp", "8.0"), ("fsdp2", "1.0")]
    assert "traffic bound" in unlimited and "structural bound" in unlimited
    assert "all losses are equal within 0.005; the greatest relative difference is 0" in printed
    assert all(Path("results/compare", name).stat().st_size > 10_000 for name in ("comparison.png", "step_time.png"))
    [limited] = [line for line in printed.splitlines() if line.startswith("  floor+50%")]
    assert limited.split()[1:] == ["–"] * 4 + ["80.0", "–"]
    [unlimited] = [line for line in printed.splitlines() if line.startswith("  none")]
    predicted = unlimited.split()[4]
    assert unlimited.split() == ["none", "150.0", "–", "100.0", predicted, "80.0", "1.50"] and float(predicted) > 0


def test_a_candidate_of_one_s_own_stands_beside_the_others(ranks):
    plan = "+compare.vary.plan='strategy=fsdp scheduler=wfbp,dear'"
    names = only("ddp", "fsdp2", "plan wfbp")
    assert (done := asked("compare.rounds=3", names, "compare.budgets=[0.005GiB,none]", plan)).returncode == 0
    document = json.loads(Path("results/compare/comparison.json").read_text())
    limited, unlimited = document["budgets"]
    assert limited["budget_bytes"] == int(0.005 * 2**30) and unlimited["budget_bytes"] is None
    assert {line["engine"]: line["fits"] for line in limited["lines"]} == {
        "mdcs": True, "plan wfbp": True, "ddp": False, "fsdp2": True,
    }  # fmt: skip
    by_name = {line["engine"]: line for line in unlimited["lines"]}
    assert by_name["mdcs"]["ratio"]["median"] == 1 and by_name["ddp"]["peak_bytes"] == 8 * MIB
    assert by_name["ddp"]["exposed_s"] is by_name["ddp"]["stalled_s"] is None  # the made-up runs do not tell
    assert unlimited["bounds"] == {"traffic": 0.05, "structural": 0.08}
    assert by_name["ddp"]["bound_s"] == by_name["mdcs"]["bound_s"] == 0.08 and by_name["ddp"]["predicted_s"] is None
    assert "× mdcs" in done.stdout


def test_an_engine_that_fails_is_left_alone_and_the_others_go_on(ranks):
    ranks.wrong["fsdp2"] = "fails"
    assert (done := asked("compare.rounds=2", only("fsdp2", "fairscale"))).returncode == 1
    assert [config.engine.name for config in ranks.calls] == ["mdcs", "fsdp2", "fairscale", "fairscale", "mdcs"]
    assert "failed: fsdp2: rank 1 was killed" in done.stdout and "fairscale" in done.stdout.partition("all losses")[0]


@pytest.mark.parametrize(("at", "rounds", "engines"), [(6, 1, {"mdcs", "ddp", "fsdp2"}), (3, 1, {"mdcs", "ddp"})])
def test_what_was_measured_before_an_interruption_is_shown(ranks, at, rounds, engines):
    ranks.wrong["interrupted at"] = at
    assert (done := asked("compare.rounds=3", only("ddp", "fsdp2"))).returncode == 130
    document = json.loads(Path("results/compare/comparison.json").read_text())
    assert (document["rounds"], len(ranks.calls)) == (rounds, at)
    assert document["budgets"][0]["bounds"] == {}  # nobody waits for a solver
    assert {line["engine"] for line in document["budgets"][0]["lines"]} == engines
    assert "interrupted: all ranks were ended" in done.stderr and "one round; " in done.stdout


def test_results_are_written_before_bounds_are_solved(ranks, monkeypatch):
    written = Path("results/compare/comparison.json")

    def bounds_of(plan, seconds):
        [part] = json.loads(written.read_text())["budgets"]
        assert [line["engine"] for line in part["lines"]] == ["mdcs", "ddp"] and part["bounds"] == {}
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "bounds_of", bounds_of)
    assert (done := asked("compare.rounds=1", only("ddp"))).returncode == 130
    assert "interrupted: without bounds" in done.stderr and "one round; " in done.stdout
    monkeypatch.setattr(compare, "bounds_of", lambda plan, seconds: BOUNDS)
    assert asked("compare.rounds=1", only("ddp")).returncode == 0
    assert json.loads(written.read_text())["budgets"][0]["bounds"] == {"traffic": 0.05, "structural": 0.08}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ("experiment=bench", [f"scheduler {name}" for name in ("sequential", "wfbp", "partitioning", "dear", "priority")]),
        ("compare=ranks", [f"ranks {count}" for count in (2, 3, 4, 6, 8)]),
        ("compare=accuracy link=emulated", ["zero2", "fsdp", "greedy", "joint", "dp", "sdp", "sequential", "memory_aware"]),
    ],
)
def test_what_varies_is_a_list_of_overrides(ranks, chosen, names):
    common = () if chosen == "experiment=bench" else COMMON
    assert (done := asked(*chosen.split(), "compare.rounds=1", "strategy=zero2", common=common)).returncode == 0
    assert [config.run.name for config in ranks.calls] == names
    assert {config.link.name for config in ranks.calls} == {"real" if chosen == "compare=ranks" else "emulated"}
    document = json.loads(Path("results/compare/comparison.json").read_text())
    assert document["base"] == names[0] and sorted(line["engine"] for line in document["budgets"][0]["lines"]) == sorted(names)
    assert list(document["losses"]["differences"]) == (names[:1] if chosen == "compare=ranks" else names)  # of equal batches
    assert f"{len(names)} predictions: median error " in done.stdout


def test_losses_that_differ_are_an_error(ranks):
    ranks.wrong["ddp"] = "differs"
    assert (done := asked("compare.rounds=1", only("ddp", "fsdp2"))).returncode == 1
    assert "losses of ddp differ by 1.5 of those of mdcs" in done.stdout and "all losses are equal" not in done.stdout


def test_a_budget_is_over_the_floor_of_each_plan(ranks, monkeypatch):
    floors = {"auto": MIB // 2, "planned": MIB}
    monkeypatch.setattr(compare, "floor_of", lambda config, job: floors[config.recompute.name])
    lean = "+compare.vary.lean='recompute=planned'"
    assert asked("compare.rounds=1", only("lean"), "compare.budgets=[floor+10%,0.75MiB]", lean).returncode == 0
    document = json.loads(Path("results/compare/comparison.json").read_text())
    assert document["floors"] == {"mdcs": MIB // 2, "lean": MIB} and document["floor_bytes"] == MIB // 2
    over, bytes_ = document["budgets"]
    assert {line["engine"]: line["fits"] for line in over["lines"]} == {"mdcs": False, "lean": True}  # both take 1 MiB
    assert [line["engine"] for line in bytes_["lines"]] == ["mdcs"] and len(ranks.calls) == 3
    [(name, reason)] = document["left_out"].items()
    assert name.startswith("lean @ ") and reason == "the model does not fit 768.0 KiB; the smallest budget is 1.0 MiB"


def test_a_budget_that_needs_recomputation_is_kept_with_a_profile_that_has_it(ranks, monkeypatch):
    plain = mdcs.Profile.from_json(PROFILE.read_text())
    profile, measured = recomputable(plain, freed=max(slot.live for slot in plain.slots) // 2), list[str]()

    def run(config, folder, console, **options):
        if options.get("only") != "profile":
            return train(config, folder, console, **options)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profile.json").write_text((profile if config.budget.limited else plain).to_json())
        measured.append(folder.name)
        return Outcome(True)

    train = jobs.run
    monkeypatch.setattr(jobs, "run", run)
    floor, lower = mdcs.floor_bytes(plain), mdcs.floor_bytes(profile, "planned")
    assert lower < floor - 16
    budgets = f"compare.budgets=[floor+10%,{floor - 8},{lower - 8}]"
    assert (done := asked("compare.rounds=1", "compare.only=[mdcs]", "strategy=greedy", budgets)).returncode == 0
    assert len(ranks.calls) == 2 and len(measured) == 3
    assert "; the smallest budget is " in done.stdout and ", with recomputation " in done.stdout


def test_a_budget_can_be_divided_in_several_ways(ranks):
    shares = "+compare.vary.shares='strategy=greedy scheduler=priority budget.schedule_share=0.2,0.8'"
    only_these = "compare.only=['shares 0.2','shares 0.8',ddp]"
    assert asked("compare.rounds=1", only_these, "compare.budgets=[4MiB]", shares).returncode == 0
    divided = {config.run.name: config.budget.schedule_share for config in ranks.calls}
    assert divided == {"ddp": None, "shares 0.2": 0.2, "shares 0.8": 0.8}
    assert {config.budget.value.size for config in ranks.calls if config.engine.plans} == {4 * MIB}


def test_without_anybody_whose_budget_suffices_nothing_runs(ranks):
    assert (done := asked("compare.only=[mdcs]", "compare.budgets=[1e-3MiB]")).returncode == 1
    assert "no candidate is left: mdcs @ " in done.stderr and ranks.calls == []


def test_checkpointing_and_units_change_nothing_that_is_trained():
    def trains(*overrides):
        config = compose_config(["model=gpt2-tiny", "data=stdlib_bytes", *overrides])
        return compare.Candidate("", config).trains

    with composing():
        assert trains() == trains("model.checkpointing=true") == trains("model.wrap=leaf") != trains("model.width=32")


@pytest.mark.slow
def test_what_cannot_run_here_is_left_out_unless_it_was_asked_for(ranks, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find(name))
    assert (done := asked("compare.rounds=1")).returncode == 0
    said = done.stdout
    missing = "engine: deepspeed is not installed: DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"
    assert f"left out: deepspeed-zero3: {missing}" in said
    assert "left out: fairscale-fsdp: engine: fairscale_fsdp needs cluster.device=cuda, got cpu" in said
    done = asked(only("deepspeed-zero3"))
    assert (done.returncode, done.stderr) == (2, f"{missing}\n")


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("link=emulated", "link.name: an emulated link paces mdcs alone: engines are compared on a real one"),
        ("compare.only=[horovod]", f"compare.only: no such candidate horovod; candidates: {', '.join(CANDIDATES)}"),
        ("compare.base=horovod", "compare.base: no such candidate horovod"),
        ("compare.rounds=0", "compare.rounds: must be >= 1, got 0"),
        ("+compare.vary.mine=strategy", "compare.vary.mine: must be overrides KEY=VALUE …, got strategy"),
        ("strategy=foo", f"strategy: no such option foo; options: {', '.join(groups()['strategy'])}"),
        ("engine=mdcs,ddp compare.only=[mdcs,ddp]", "engine: engine=mdcs,ddp and compare.only"),
        ("compare.only=[mdcs,ddp] compare.budgets=[floor+10%] budget=1GiB", "budget: "),
        ("compare.only=[ddp,fsdp2] compare.budgets=[4MiB,floor+10%]", "compare.budgets: floor+10% is a share "),
    ],
)
def test_a_wrong_override_is_one_line_and_starts_nothing(ranks, argument, line):
    assert (done := asked(*argument.split())).returncode == 2
    [said] = done.stderr.splitlines()
    assert said.startswith(line) and ranks.calls == []
