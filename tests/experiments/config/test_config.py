"""Every config composes, and every wrong value is one line with its full key."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.config import checks, files, schema, targets
from experiments.config.identity import about, job_identity
from experiments.config.schema import OPTION_GROUPS, ClusterConfig, CompareConfig, Config, ConfigError
from experiments.job.record import identity_of
from mdcs.options import LIMITS, options


def composed(*overrides: str) -> Config:
    return checks.compose_config(overrides)


def a_third(rows: Iterable[tuple[str, str]]) -> list[Any]:
    """All of them, two of three slow: to compose takes a quarter of a second."""
    return [pytest.param(*row, marks=[pytest.mark.slow] if n % 3 else []) for n, row in enumerate(rows)]


OWN = {"model": "examples.own_model.gpt2.build_model", "data": "torch.utils.data.TensorDataset",
       "optimizer": "torch.optim.RMSprop"}  # fmt: skip
OPTIONS = [(group, option) for group, options in files.groups().items() for option in options]


@pytest.mark.parametrize(("group", "option"), a_third(OPTIONS), ids=lambda value: value)
def test_every_option_of_every_group_composes(group, option, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch")
    images = option.startswith(("resnet", "mlp", "vit"))
    needed = ["data=digits"] if images else ["model=mlp"] if option == "digits" else []
    needed += ["data=nli"] if option.endswith("-pairs") else ["model=bert-tiny-pairs"] if option.endswith("nli") else []
    needed += ["data=synthetic"] if option.startswith("timed") else ["data.path=README.md"] if option == "text" else []
    needed += [f"{group}._target_={OWN[group]}"] if option == "own" else []
    needed += ["cluster.device=cuda", "cluster.ranks=1"] if option in ("fairscale_fsdp", "dataparallel") else []
    made = composed(f"{group}={option}", *needed)
    assert isinstance(made, Config)
    if option.startswith("results_"):  # of benchmarks/results.py
        assert made.compare.rounds >= 3 and set(made.compare.vary) != {"mdcs"} and made.compare.budgets


@pytest.mark.parametrize("group", OPTION_GROUPS)
def test_a_file_has_a_value_for_every_option_of_its_class(group):
    """One sees all that can be overridden."""
    for path in (files.CONF / group).glob("[!_]*.yaml"):
        given = files.values(path)
        if (target := given.pop("_target_")) != "???":
            assert {*given} == {*options(targets.load(group, target))}, path


def test_every_file_says_what_it_is():
    """In its first line, which --help prints."""
    assert [f"{group}={option}" for group, told in files.groups().items() for option, says in told.items() if not says] == []


def test_the_launcher_does_without_torch(tmp_path):
    """It takes seconds to import, which every job would wait for."""
    code = "import sys; from experiments import train; from experiments.config import checks\nwith checks.composing():\n"
    code += "    for job in (JOBS): checks.compose_config(job.split())\nassert 'torch' not in sys.modules"
    jobs = ["strategy=joint data=synthetic optimizer=sgd", "model=timed data=synthetic", "model=mlp data=digits",
            "model=resnet50 data=synthetic tracker=wandb",
            *(f"engine={name}" for name in ("ddp", "fsdp2", "fairscale", "deepspeed"))]  # fmt: skip
    subprocess.run([sys.executable, "-c", code.replace("JOBS", repr(jobs))], check=True)


def test_a_strategy_that_decides_the_schedule_leaves_no_scheduler_and_no_share():
    joint = composed("strategy=joint", "budget=1GiB")
    assert joint.scheduler is None
    assert joint == composed("strategy=joint", "scheduler=dear", "budget=1GiB", "budget.schedule_share=0.5")


WRONG = """
budget.limit=-5 | budget.limit= | budget.limit=null | budget.limit=1,2 | +anything=5 | ~budget.limit | budget=5
budget.exceeded=stop | budget.reserve_mib=-1
budget=1GiB budget.reserve_mib=1024 | budget=1GiB budget.schedule_share=1.5 | budget=1GiB budget.schedule_share=-0.1
budget.schedule_share=0.5 | strategy=foo | experiment=none | strategy=joint scheduler=joint | ~scheduler
strategy=joint strategy.seconds=50 | scheduler=memory_aware scheduler.seconds=50
strategy.each=zero9 | strategy.each=null | strategy.seed=3 | strategy=random +strategy.seed=3 | strategy=random strategy.seed=null
strategy=random strategy.seed=-1 | strategy=null | strategy._target_=mine.Best | strategy._target_=mdcs.options.option
strategy._target_=mdcs.options.Best | scheduler._target_=mdcs.planner.strategies.Greedy | scheduler=fusion scheduler.bucket_mib=0
link=emulated link.rate_gbit=0 | link=emulated link.latency_us=-1 | link.depth=0 | link=emulated link.depth=null
run.precision=fp8 | run.grad_precision=fp32 | run.precision=bf16 engine=ddp -> run.precision | collectives=tree
collectives.algorithm=direct | collectives.algorithm=null
collectives=ring cluster.device=cuda -> collectives.algorithm | cluster.ranks=0 | cluster.threads=0
cluster.timeout_s=0 | cluster.backend=nccl | cluster.rate_gbit=1 | cluster=shaped cluster.rate_gbit=0
cluster=shaped cluster.rate_gbit=null | cluster=shaped cluster.device=cuda
cluster=shaped cluster.ranks=4 cluster.nodes=3 | cluster.nodes=2
cluster.name=joined cluster.nodes=2 link=emulated -> link.name | cluster=shaped link=emulated -> link.name
+cluster=shaped | hydra.launcher.x=1 | run.name=${oc.env:NOPE} | run.steps=0 | run.steps=2.5 | run.steps=true | run.steps=null
run.steps=5 run.unmeasured_steps=5 | run=null | optimizer.fused=maybe | optimizer.betas=[a,1]
optimizer.betas=[0.9] | optimizer.betas=[0.9,1] | optimizer.momentum=0.9 | optimizer.clip_norm=0 | model=own -> model._target_
model=own model._target_= | model=own model._target_=torch.nn | optimizer._target_=torch.optim.RMSprop
++model._target_=torch.nn.Linear | budget.limit=???
data=own data._target_=builtins.list data.collate=3 | model.layers=0 | model.depth=2 | model.checkpointing=auto
batch.find=most | batch.find=largest | batch.find=largest budget=floor+10% -> batch.find | batch.at_most=8
batch.find=fastest budget=1GiB batch.profiles=[0]
batch.find=fastest budget=1GiB batch.profiles=[2] profile.path=x -> batch.profiles
model.width=10 model.heads=3 | model.vocab=100 -> data | model.weights=/no/such/folder
model=llama-tiny model.kv_heads=3 | model=vit-tiny model.patch=5 data=synthetic -> model.patch
model=bert-tiny-pairs data=stdlib_bytes | data=nli | model=bert-tiny-pairs data=nli model.vocab=256 -> data
model=bert-tiny-pairs data=nli model.classes=2 -> data | model=bert-tiny-pairs data=nli data.path=none.jsonl
model=bert-tiny-pairs data=nli data.tokenizer=./none | model=gpt2-tiny data=text -> data.path
model.frozen=5 | model=mlp data=stdlib_bytes | model=timed data=stdlib_bytes
data=digits | data.batch_size=0 | tracker.project=x | profile.path=/no/such/file
profile.path=x profile.refresh=true | profile.layers=2
engine=horovod | engine=fairscale_fsdp | engine=dataparallel
engine=dataparallel cluster.device=cuda -> cluster.ranks | engine=ddp engine.bucket_mib=0
engine=ddp engine.bucket_mib=null | engine.bucket_mib=4 | engine=deepspeed engine.stage=4
engine=fsdp2 engine.plan=/no/such engine.prefetch=1 -> engine.plan | engine=fsdp2 engine.plan=/no/such
engine=ddp strategy=fsdp | engine=fsdp2 scheduler=dear | engine=fsdp2 collectives=ring -> collectives.algorithm
engine=ddp run.cross_iteration=false | engine=ddp run.save_every=5 | run.save_every=0 | run.keep=0 | engine=ddp link.depth=3
engine=ddp profile.refresh=true | engine=ddp budget=floor+10% -> budget.limit
engine=ddp budget=1GiB budget.reserve_mib=1 | engine=fairscale link=emulated -> link.name | nothing | model.frozen=[a
"""
"""Overrides, apart by | or lines; the key that is wrong is that of the last, but where -> names another."""
HINTS = {
    "budget.limt=5": "budget.limit", "+budget.limt=5": "budget.limit", "strategy=zero3": "fsdp", "runs.steps=3": "run.steps",
    "batch_size=8": "data.batch_size", "lr=0.1": "optimizer.lr", "stratgy=dp": "strategy",
    "strategy=random strategy.sed=3": "strategy.seed", "strategy=random +strategy.sed=3": "strategy.seed",
    "cluster=shapd": "shaped", "hydra/launcher=mdcs_slrm": "mdcs_slurm",
    "hydra.run.dri=x": "hydra.run.dir", "steps=3": "run.steps", "model._target_=mdcs.gone.Vit": "experiments.tasks.model.Vit",
}  # fmt: skip
"""More of them, and what was meant."""


def rows() -> list[tuple[str, str]]:
    every = [row.strip().partition(" -> ") for line in WRONG.strip().splitlines() for row in line.split(" | ")]
    every += [(asked, "", "") for asked in HINTS]
    return [(asked, key or asked.split()[-1].partition("=")[0].lstrip("+~")) for asked, _, key in every]


@pytest.mark.parametrize(("overrides", "key"), a_third(rows()), ids=lambda value: value)
def test_a_wrong_value_is_one_line_with_its_key(overrides, key):
    with pytest.raises(ConfigError) as caught:
        composed(*overrides.split())
    assert caught.value.key == key and str(caught.value).startswith(f"{key}: ") and "\n" not in str(caught.value)
    assert overrides not in HINTS or f"did you mean {HINTS[overrides]}" in str(caught.value)


def test_no_limit_is_left_unchecked():
    """A misspelt limit in a field's metadata would be ignored in silence."""
    known = {"about", *LIMITS, "used_by", "needed_by", "profiled", "sets", "divides"}
    declared = dict(schema.fields_by_key())
    for group in OPTION_GROUPS:
        for path in (files.CONF / group).glob("[!_]*.yaml"):
            if (target := files.values(path)["_target_"]) != "???":
                declared |= {f"{path.stem}.{name}": field for name, field in options(targets.load(group, target)).items()}
    for key, leaf in declared.items():
        assert set(leaf.metadata) <= known, key
        assert leaf.metadata["about"], key


def test_a_saved_config_is_loaded_unchanged(tmp_path):
    for overrides in (
        "strategy=greedy scheduler=fusion budget=0.5GiB optimizer.betas=[0.8,0.9]",
        "strategy=joint model.frozen=[a*]",
    ):
        made = composed(*overrides.split())
        checks.save(made, tmp_path / "config.yaml")
        made.compare = CompareConfig()  # which is no part of a job
        assert checks.load(tmp_path / "config.yaml") == made


def test_the_config_of_ranks_on_another_host_is_without_the_profile_and_loaded_all_the_same(tmp_path):
    made = composed("model=gpt2-tiny", "link=emulated", f"profile.path={PROFILE}", "budget=1GiB")
    checks.save(replace(made, profile=replace(made.profile, path=None)), tmp_path / "config.yaml")
    assert checks.load(tmp_path / "config.yaml").profile.path is None


def test_threads_are_the_cores_divided_by_ranks(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    for (ranks, threads), wanted in zip(product([1, 3, 16], [None, 5]), [8, 5, 2, 5, 1, 5], strict=True):
        assert schema.ClusterConfig(ranks=ranks, threads=threads).resolved_threads() == wanted


def test_the_other_files_only_choose():
    """Keys of groups without classes exist in the schema, which has their types, ranges and defaults."""
    declared = schema.fields_by_key()
    for group, option in OPTIONS:
        text = (files.CONF / group / f"{option}.yaml").read_text(encoding="utf-8")
        if group not in OPTION_GROUPS and not text.startswith("# @package _global_"):
            for key in yaml.safe_load(text):
                assert f"{group}.{key}" in declared, f"{group}/{option}: {key}"


PROFILE = Path(__file__).parents[1] / "profile.json"
identified = functools.cache(lambda *overrides: job_identity(composed(*overrides)))


def profile_of(tmp_path: Path, *overrides: str, emulated: bool = False, shaped_link: str = "") -> str:
    """A profile as a job with these overrides would have measured it."""
    text = json.loads(PROFILE.read_text())
    text["about"] = identified(*overrides) | {"shaped_link": shaped_link}
    text["link"]["emulated"] = emulated
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(text))
    return f"profile.path={path}"


def test_a_profile_is_taken_for_the_job_it_was_measured_with(tmp_path):
    profile = profile_of(tmp_path, "strategy=dp", "run.steps=7")
    other_plan = ("strategy=fsdp", "scheduler=dear", "budget=1GiB", "run.accumulation=2")
    assert composed(profile, *other_plan).profile.path == profile.partition("=")[2]
    assert composed(profile, "link=emulated", "link.rate_gbit=10").link.rate_gbit == 10


def test_a_profile_that_is_named_is_taken_though_the_models_code_has_changed_with_a_warning(tmp_path):
    profile = profile_of(tmp_path)
    path = Path(profile.partition("=")[2])
    text = json.loads(path.read_text())
    text["about"]["model.code"] = "before"
    path.write_text(json.dumps(text))
    with pytest.warns(UserWarning, match=f"profile.path: {path} was measured with other code of the model"):
        assert composed(profile).profile.path == str(path)


def test_a_profile_that_cannot_be_used_is_refused_and_one_written_by_hand_is_not(tmp_path):
    """Profiles of a link that was emulated, of a class that has another name now, and of no profile at all."""
    moved = tmp_path / "moved.json"
    moved.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"about": {"model": "experiments.tasks.gpt2.Gpt2"}}))
    for asked, why in ((profile_of(tmp_path, emulated=True), "has not measured the link"),
                       (f"profile.path={moved}", "did you mean experiments.tasks.model.Gpt2"),
                       ("profile.path=setup.cfg", "is not a profile.json: Expecting value")):  # fmt: skip
        with pytest.raises(ConfigError, match=why) as error:
            composed(asked)
        assert error.value.key == "profile.path"
    assert composed(f"profile.path={PROFILE}", "model.layers=3").profile.path == str(PROFILE)


def test_algorithms_other_than_a_profile_was_measured_with_are_refused_but_for_an_emulated_link(tmp_path):
    profile = profile_of(tmp_path)
    assert composed(profile, "collectives=ring").collectives.named == "ring"
    with pytest.raises(ConfigError) as error:
        composed(profile, "collectives=native")
    measured = f"{profile.partition('=')[2]} was measured with ring, got native"
    assert str(error.value) == f"collectives.algorithm: {measured}"
    assert composed(profile, "collectives=native", "link=emulated").collectives.named == "native"
    assert composed("collectives=native", "cluster.device=cuda").collectives.named == "native"


def test_a_profile_of_another_job_is_refused(tmp_path):
    """A number, a list, a class, and none; what else makes a job another is in job/test_profiles.py."""
    profile = profile_of(tmp_path)
    for override, reason in (
        ("model.layers=3", "model.layers 2; this job has 3"),
        ("model.frozen=[*.bias]", "model.frozen []; this job has [*.bias]"),
        ("optimizer=adamw", "optimizer experiments.tasks.optimizers.Adam; this job has experiments.tasks.optimizers.AdamW"),
        ("optimizer.fused=true", "optimizer.fused null; this job has true"),
    ):
        with pytest.raises(ConfigError) as error:
            composed(profile, override)
        assert str(error.value) == f"profile.path: {profile.partition('=')[2]} was measured with {reason}"


def test_a_profile_of_another_link_is_refused(tmp_path):
    shaped = ("cluster=shaped", "cluster.rate_gbit=2")
    profile = profile_of(tmp_path, shaped_link="1 Gbit/s")
    assert composed(profile, "cluster=shaped").cluster.rate_gbit == 1
    assert composed(profile, "link=emulated").link.name == "emulated"
    was = f"profile.path: {profile.partition('=')[2]} was measured with cluster.rate_gbit"
    for link, overrides, reason in (("1 Gbit/s", shaped, "1 Gbit/s; this job has 2 Gbit/s"),
                                    ("1 Gbit/s", ("cluster=local",), "1 Gbit/s; this job has none"),
                                    ("", shaped, "none; this job has 2 Gbit/s")):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            composed(profile_of(tmp_path, shaped_link=link), *overrides)
        assert str(error.value) == f"{was} {reason}"


def test_a_profile_says_what_the_command_line_does_not(tmp_path):
    """Model, batch, precision, ranks, hosts, network and link; what is said otherwise is refused."""
    asked = ("model=mlp", "data=digits", "optimizer=sgd", "run.precision=fp64", "data.batch_size=16")
    own = composed(*asked)
    own.cluster = replace(own.cluster, name="joined", ranks=4, nodes=2, network="eth0 25 Gbit/s")
    text = json.loads(PROFILE.read_text()) | {"about": about(own), "world": 4}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(text))
    found = composed(f"profile.path={path}")
    assert (found.model, found.data, found.run, found.cluster) == (own.model, own.data, own.run, own.cluster)
    assert composed(f"profile.path={path}", "link=emulated").cluster == replace(ClusterConfig(), ranks=4)
    for said, reason in (("cluster.ranks=2", "cluster.ranks 4; this job has 2"),
                         ("cluster=local", "cluster.nodes 2; this job has none"),
                         ("cluster.network=lo", "cluster.network eth0 25 Gbit/s; this job has lo")):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            composed(f"profile.path={path}", said)
        assert str(error.value) == f"profile.path: {path} was measured with {reason}"
    text["about"] = about(composed("link=emulated", "cluster=emulated", "cluster.rank=3", "link.rate_gbit=7"))
    path.write_text(json.dumps(text))
    link, cluster = (getattr(composed(f"profile.path={path}"), group) for group in ("link", "cluster"))
    assert (link.name, link.rate_gbit, cluster.name, cluster.ranks, cluster.rank) == ("emulated", 7, "emulated", 64, 3)


PLAN = {"schema": 3, "ranks": 2, "groups": [{"mesh": [2, 1]}]}


@pytest.mark.parametrize(
    ("said", "override", "problem"),
    [
        ({}, "engine.reduce_scatter=all_to_all", "engine.reduce_scatter: must be own where a plan has dp or shards within nodes"),
        ({"ranks": 4}, "", "engine.plan: is for 4 ranks, cluster.ranks=2"),
        ({"schema": 1, "groups": [{"replicate": True}]}, "", "has schema 1, not 3: export the plan again"),
        ({"groups": [{}]}, "", "engine.plan: is not a file of mdcs export: 'mesh'"),
    ],
)
def test_a_plan_that_was_taken_home_is_checked_before_anything_starts(tmp_path, said, override, problem):
    (tmp_path / "fsdp2.json").write_text(json.dumps(PLAN | said))
    with pytest.raises(ConfigError) as error:
        composed("engine=fsdp2", f"engine.plan={tmp_path / 'fsdp2.json'}", *override.split())
    assert problem in str(error.value)


def test_a_plan_that_was_taken_home_belongs_to_a_runs_identity_by_what_is_in_it(tmp_path):
    found = set()
    for name, step in (("a", 1), ("b", 1), ("b", 2)):
        (tmp_path / name).write_text(json.dumps(PLAN | {"predicted": step}))
        found.add((identity_of(composed("engine=fsdp2", f"engine.plan={tmp_path / name}")), step))
    assert len(found) == 2 == len({identity for identity, _ in found})


@pytest.mark.parametrize(
    ("chosen", "name"), [("model=mlp", "synthetic"), ("model=timed", "synthetic"), ("model=bert-tiny", "stdlib_bytes")]
)
def test_a_model_chooses_its_data_where_the_config_does_not(chosen, name):
    data = composed(chosen, "data.batch_size=3").data
    assert (data.name, data.batch_size) == (name, 3)


def test_the_warm_up_that_nobody_asked_for_is_shorter_than_the_run():
    assert [composed(f"run.steps={steps}").run.unmeasured_steps for steps in (1, 5, 6)] == [0, 4, 5]
