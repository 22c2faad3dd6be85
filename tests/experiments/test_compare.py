"""`compare.py`: who takes turns, what is asked of whom, and what is said in the end. The runs are made up."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import mdcs
from analysis.events import METRICS
from experiments import compare
from experiments.config.files import groups
from experiments.job import run as jobs
from experiments.job.events import job_event
from experiments.job.tracking import JsonLines
from launch.elastic import Outcome
from mdcs.planner.bounds import Bounds
from mdcs.planner.schedulers.dear import Dear
from mdcs.planner.strategies.uniform import Uniform

PROFILE = Path(__file__).with_name("profile.json")
MIB = 2**20
COMMON = ("model=mlp", "data=digits", "run.steps=3", "run.warmup_steps=1")
STEP_S = {"mdcs": 0.1, "ddp": 0.15, "fsdp2": 0.4, "fairscale": 0.2}
PEAK_MIB = {"mdcs": 1, "ddp": 8, "fsdp2": 1, "fairscale": 8}


@pytest.fixture
def ranks(monkeypatch, tmp_path):
    """No rank is started: a run is what is written for it. Returns the calls, and what may go wrong by name."""
    calls, wrong = [], {}
    profile = mdcs.Profile.from_json(PROFILE.read_text())
    plan = mdcs.make_plan(profile, Uniform("zero2"), Dear(bucket_mib=1.0))

    def run(config, folder, console, *, known, only=None, kind="train", worker):
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
            for step in (1, 2, 3):
                off = 0.5 if wrong.get(name) == "differs" else 0
                told = {"step": step, "warmup": step == 1, "loss": 1 / step + off, "step_s": STEP_S[name]}
                metrics.write({"event": "step", **told})
            spread = dict.fromkeys(("median", "p10", "p90"), STEP_S[name])
            metrics.write({"event": "summary", "status": "ok", "step_s": spread, "peak_bytes": PEAK_MIB[name] * MIB})
        return Outcome(True)

    monkeypatch.setattr(jobs, "run", run)
    monkeypatch.setattr(compare, "bounds_of", lambda plan, seconds: Bounds(0.05, 0.08, None))
    monkeypatch.chdir(tmp_path)
    return calls, wrong


def asked(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments, *COMMON])
    return compare.main()


def test_engines_take_turns_and_every_budget_has_a_run_of_mdcs(ranks, monkeypatch, capsys):
    calls, _ = ranks
    assert asked(monkeypatch, "--rounds", "2", "--engines", "ddp,fsdp2", "--budgets", "50%,none", "strategy=greedy") == 0
    names = [(config.engine.name, config.budget.over_floor) for config in calls]
    first = [("mdcs", 0.5), ("mdcs", None), ("ddp", None), ("fsdp2", None)]
    assert names == [*first, *first[1:], first[0]]
    assert {config.strategy.name for config in calls if config.engine.name == "mdcs"} == {"greedy"}
    printed = capsys.readouterr().out
    limited, unlimited = printed.split("no limit")
    assert "budget 0.0 MiB (floor + 50%)" in limited and "do not fit: mdcs (1.0 MiB), ddp (8.0 MiB), fsdp2 (1.0 MiB)" in limited
    assert "traffic bound" in unlimited and "structural bound" in unlimited
    assert "an ideal DDP: " in unlimited and "mdcs wins 50.0 ms over ddp" in unlimited and "ideal DDP" not in limited
    assert "all losses are equal within 0.005; the greatest relative difference is 0" in printed
    assert (Path("results/compare/comparison.png")).stat().st_size > 10_000
    [limited] = [line for line in printed.splitlines() if line.startswith("  floor + 50%")]
    assert limited.split()[3:] == ["–"] * 6 + ["80.0", "–"]
    [unlimited] = [line for line in printed.splitlines() if line.startswith("  none")]
    assert unlimited.split() == ["none", "150.0", "400.0", "–", "–", "100.0", "–", "80.0", "1.50"]


def test_json_is_all_that_is_printed_and_is_what_is_written(ranks, monkeypatch, capsys):
    plan = ("--mdcs", "strategy=fsdp scheduler=wfbp")
    wanted = ("--rounds", "3", "--engines", "ddp,fsdp2", "--budgets", "0.005,none", *plan, "--format", "json")
    assert asked(monkeypatch, *wanted) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(Path("results/compare/comparison.json").read_text())
    limited, unlimited = document["budgets"]
    assert limited["budget_bytes"] == int(0.005 * 2**30) and unlimited["budget_bytes"] is None
    assert {line["engine"]: line["fits"] for line in limited["lines"]} == {
        "mdcs": True, "mdcs fsdp wfbp": True, "ddp": False, "fsdp2": True,
    }  # fmt: skip
    by_name = {line["engine"]: line for line in unlimited["lines"]}
    assert by_name["mdcs"]["ratio"]["median"] == 1 and by_name["ddp"]["peak_bytes"] == 8 * MIB
    assert by_name["ddp"]["exposed_s"] is by_name["ddp"]["stalled_s"] is None  # the made-up runs do not tell
    assert unlimited["bounds"] == {"traffic": 0.05, "structural": 0.08}
    assert by_name["ddp"]["above"] == pytest.approx({"traffic": 0.15 / 0.05 - 1, "structural": 0.15 / 0.08 - 1})


def test_an_engine_that_fails_is_left_alone_and_the_others_go_on(ranks, monkeypatch, capsys):
    calls, wrong = ranks
    wrong["fsdp2"] = "fails"
    assert asked(monkeypatch, "--rounds", "2", "--engines", "fsdp2,fairscale") == 1
    assert [config.engine.name for config in calls] == ["mdcs", "fsdp2", "fairscale", "fairscale", "mdcs"]
    printed = capsys.readouterr().out
    assert "failed: fsdp2: rank 1 was killed" in printed and "fairscale" in printed.partition("all losses")[0]


@pytest.mark.parametrize(("at", "rounds", "engines"), [(6, 1, {"mdcs", "ddp", "fsdp2"}), (3, 1, {"mdcs", "ddp"})])
def test_what_was_measured_before_an_interruption_is_shown(ranks, monkeypatch, capsys, at, rounds, engines):
    calls, wrong = ranks
    wrong["interrupted at"] = at
    assert asked(monkeypatch, "--rounds", "3", "--engines", "ddp,fsdp2") == 130
    document = json.loads(Path("results/compare/comparison.json").read_text())
    assert (document["rounds"], len(calls)) == (rounds, at)
    assert {line["engine"] for line in document["budgets"][0]["lines"]} == engines
    printed = capsys.readouterr()
    assert "interrupted: all ranks were ended" in printed.err and "medians of 1 rounds" in printed.out


def test_overrides_may_come_before_between_and_behind_options(ranks, monkeypatch, capsys):
    calls, _ = ranks
    words = [*COMMON, "--rounds", "1", "strategy=greedy", "--engines", "ddp", "run.seed=7"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *words])
    assert compare.main() == 0
    assert {config.run.seed for config in calls} == {7} and calls[0].strategy.name == "greedy"


def test_losses_that_differ_are_an_error(ranks, monkeypatch, capsys):
    _, wrong = ranks
    wrong["ddp"] = "differs"
    assert asked(monkeypatch, "--rounds", "1", "--engines", "ddp,fsdp2") == 1
    printed = capsys.readouterr().out
    assert "losses of ddp differ by 1.5 of those of mdcs" in printed and "all losses are equal" not in printed


def test_under_a_budget_below_the_floor_peers_run_alone(ranks, monkeypatch, capsys):
    assert asked(monkeypatch, "--rounds", "1", "--engines", "ddp", "--budgets", "0.0000001") == 0
    assert "left out: mdcs @ 1e-07 GiB: the smallest feasible budget is " in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_run_here_is_left_out_unless_it_was_asked_for(ranks, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "deepspeed" else find(name))
    monkeypatch.setitem(STEP_S, "ddp_no_overlap", 0.3)
    monkeypatch.setitem(PEAK_MIB, "ddp_no_overlap", 8)
    assert asked(monkeypatch, "--rounds", "1") == 0
    said = capsys.readouterr().out
    assert "left out: zero-3: engine: deepspeed is not installed: pip install 'mdcs[deepspeed]'" in said
    assert "left out: fairscale-fsdp: engine: fairscale_fsdp needs cluster.device=cuda, got cpu" in said
    assert asked(monkeypatch, "--engines", "zero-3") == 2
    assert capsys.readouterr().err == "engine: deepspeed is not installed: pip install 'mdcs[deepspeed]'\n"


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        ("link=emulated", "link.name: an emulated link paces mdcs alone: peers are compared on a real one"),
        ("budget.gib=1", "budget.gib: is chosen with --budgets here"),
        ("engine=ddp", "engine: is chosen with --engines here"),
        ("strategy=foo", f"strategy: no such option foo; options: {', '.join(groups()['strategy'])}"),
    ],
)
def test_a_wrong_override_is_one_line_and_starts_nothing(ranks, monkeypatch, capsys, argument, line):
    calls, _ = ranks
    assert asked(monkeypatch, argument) == 2
    assert capsys.readouterr().err == line + "\n" and calls == []


@pytest.mark.parametrize("arguments", [("--budgets", "-1"), ("--budgets", "x%"), ("--engines", "horovod"), ("--rounds", "0")])
def test_a_wrong_argument_is_said_by_name(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        asked(monkeypatch, *arguments)
    assert f"argument {arguments[0]}: " in capsys.readouterr().err
