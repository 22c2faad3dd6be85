"""Every config composes, and every wrong value is one line with its full key."""

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
    needed += ["cluster=cuda", "cluster.ranks=1"] if option in ("fairscale_fsdp", "dataparallel") else []
    made = composed(f"{group}={option}", *needed)
    assert isinstance(made, Config)


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


NO_BUDGET = """\
budget must be a size, such as 40GiB, a part of what DDP needs, such as 75% of ddp, a part above the smallest possible, such as \
floor+10%, or none; got """
WRONG = {
    "budget.limit=-5": f"budget.limit: {NO_BUDGET}'-5'",
    "budget.limit=0": f"budget.limit: {NO_BUDGET}'0'",
    "budget.limit=inf": f"budget.limit: {NO_BUDGET}'inf'",
    "budget.limit=abc": f"budget.limit: {NO_BUDGET}'abc'",
    "budget.limit=": f"budget.limit: {NO_BUDGET}''",
    "budget.limit=null": "budget.limit: must be text, got null",
    "budget.limit=1,2": "budget.limit: is one value, got 1,2: mdcs train -m runs one job for each",
    "budget.limt=5": "budget.limt: no such key; did you mean budget.limit?",
    "+budget.limt=5": "budget.limt: no such key; did you mean budget.limit?",
    "+anything=5": "anything: no such key",
    "~budget.limit": "budget.limit: cannot be deleted; set it to null where that is allowed",
    "budget=5": "budget: no such limit 5; a limit is 40GiB, '75% of ddp', floor+10% or none",
    "strategy=zero3": f"strategy: no such option zero3; options: {', '.join(files.groups()['strategy'])}; did you mean fsdp?",
    "batch_size=8": "batch_size: no such key; did you mean data.batch_size?",
    "lr=0.1": "lr: no such key; did you mean optimizer.lr?",
    "budget.exceeded=stop": "budget.exceeded: must be one of warn, raise; got stop",
    "budget.reserve_mib=-1": "budget.reserve_mib: must be >= 0, got -1",
    "budget=1GiB budget.reserve_mib=1024": "budget.reserve_mib: must be below the budget of 1GiB, got 1024",
    "budget=1GiB budget.schedule_share=1.5": "budget.schedule_share: must be <= 1, got 1.5",
    "budget=1GiB budget.schedule_share=-0.1": "budget.schedule_share: must be >= 0, got -0.1",
    "budget.schedule_share=0.5": (
        "budget.schedule_share: needs a budget to divide: add budget=40GiB or budget=floor+10%"
    ),
    "strategy=foo": f"strategy: no such option foo; options: {', '.join(files.groups()['strategy'])}",
    "experiment=none": f"experiment: no such option none; options: {', '.join(files.groups()['experiment'])}",
    "strategy=joint scheduler=joint": (
        "scheduler: no such option joint; options: dear, fusion, memory_aware, mg_wfbp, partitioning, priority, random,"
        " sequential, wfbp"
    ),
    "~scheduler": "scheduler: is needed with strategy=dp, got null",
    "strategy=joint strategy.seconds=50": "strategy.seconds: must be at most half of cluster.timeout_s=60, got 50",
    "scheduler=memory_aware scheduler.seconds=50": (
        "scheduler.seconds: must be at most half of cluster.timeout_s=60, got 50"
    ),
    "stratgy=dp": "stratgy: no such key; did you mean strategy?",
    "strategy.each=zero9": "strategy.each: must be one of dp, zero2, sdp, fsdp, hsdp_no_reshard, hsdp; got zero9",
    "strategy.each=null": "strategy.each: must be text, got null",
    "strategy.seed=3": "strategy.seed: no such key of strategy=dp; its keys: each",
    "strategy=greedy strategy.seed=3": "strategy.seed: no such key of strategy=greedy; it has none",
    "strategy=random strategy.sed=3": "strategy.sed: no such key of strategy=random; did you mean strategy.seed?",
    "strategy=random +strategy.sed=3": "strategy.sed: no such key of strategy=random; did you mean strategy.seed?",
    "strategy=random +strategy.seed=3": "strategy.seed: is set already: leave out the +",
    "strategy=random strategy.seed=null": "strategy.seed: must be an integer, got null",
    "strategy=random strategy.seed=-1": "strategy.seed: must be >= 0, got -1",
    "strategy=null": f"strategy: no such option null; options: {', '.join(files.groups()['strategy'])}",
    "strategy._target_=mine.Best": "strategy._target_: mine.Best: no module mine; is it installed, or on PYTHONPATH?",
    "strategy._target_=mdcs.options.option": "strategy._target_: mdcs.options.option is no dataclass",
    "strategy._target_=mdcs.options.Best": "strategy._target_: mdcs.options.Best: mdcs.options has no Best",
    "scheduler._target_=mdcs.planner.strategies.Greedy": (
        "scheduler._target_: mdcs.planner.strategies.Greedy has no method schedule"
    ),
    "scheduler=fusion scheduler.bucket_mib=0": "scheduler.bucket_mib: must be > 0, got 0",
    "link=emulated link.rate_gbit=0": "link.rate_gbit: must be > 0, got 0",
    "link=emulated link.latency_us=-1": "link.latency_us: must be >= 0, got -1",
    "link.depth=0": "link.depth: must be >= 1, got 0",
    "link=emulated link.depth=null": "link.depth: is needed with link.name=emulated, got null",
    "run.precision=fp8": "run.precision: must be one of fp32, fp64, bf16, fp16; got fp8",
    "run.grad_precision=fp32": "run.grad_precision: has no effect with run.precision=fp32, got fp32",
    "run.precision=bf16 engine=ddp": "run.precision: must be fp32 or fp64 with engine=ddp, got bf16",
    "collectives=tree": (
        "collectives: no such option tree; options: auto, native, ring"
    ),
    "collectives.algorithm=direct": "collectives.algorithm: must be one of auto, native, ring; got direct",
    "collectives.algorithm=null": "collectives.algorithm: must be text, got null",
    "collectives=ring cluster=cuda": "collectives.algorithm: must be native with cluster.device=cuda, got ring",
    "cluster.ranks=0": "cluster.ranks: must be >= 1, got 0",
    "cluster.threads=0": "cluster.threads: must be >= 1, got 0",
    "cluster.timeout_s=0": "cluster.timeout_s: must be > 0, got 0",
    "cluster.backend=nccl": "cluster.backend: nccl needs cluster.device=cuda, got cpu",
    "cluster.rate_gbit=1": "cluster.rate_gbit: has no effect with cluster.name=local, got 1",
    "cluster=shaped cluster.rate_gbit=0": "cluster.rate_gbit: must be >= 0.001, got 0",
    "cluster=shaped cluster.rate_gbit=null": "cluster.rate_gbit: is needed with cluster.name=shaped, got null",
    "cluster=shaped cluster.device=cuda": "cluster.device: must be cpu with cluster.name=shaped, got cuda",
    "cluster=shaped cluster.ranks=4 cluster.nodes=3": "cluster.nodes: must divide cluster.ranks=4, got 3",
    "cluster.nodes=2": "cluster.nodes: has no effect with cluster.name=local, got 2",
    "cluster.name=joined cluster.nodes=2 link=emulated":
        "link.name: must be real: the ranks of 2 hosts have no common clock to pace by",
    "cluster=shaped link=emulated": "link.name: must be real with cluster.name=shaped, got emulated",
    "cluster=shapd": "cluster: no such option shapd; options: cuda, emulated, local, shaped; did you mean shaped?",
    "+cluster=shaped": "cluster: is set already: leave out the +",
    "hydra/launcher=mdcs_slrm":
        "hydra/launcher: no such option mdcs_slrm; options: basic, mdcs_slurm; did you mean mdcs_slurm?",
    "hydra.run.dri=x": "hydra.run.dri: no such key; did you mean hydra.run.dir?",
    "hydra.launcher.x=1": "hydra.launcher.x: no such key",
    "run.name=${oc.env:NOPE}":
        "run.name: KeyError raised while resolving interpolation: \"Environment variable 'NOPE' not found\"",
    "run.steps=0": "run.steps: must be >= 1, got 0",
    "run.steps=2.5": "run.steps: must be an integer, got 2.5",
    "run.steps=true": "run.steps: must be an integer, got true",
    "run.steps=null": "run.steps: must be an integer, got null",
    "run.steps=5 run.warmup_steps=5": "run.warmup_steps: must be < run.steps=5, got 5",
    "run=null": "run: must hold keys and values",
    "steps=3": "steps: no such key; did you mean run.steps?",
    "optimizer.fused=maybe": "optimizer.fused: must be true or false or null, got maybe",
    "optimizer.betas=[a,1]": "optimizer.betas: must be a list, each value a number, got [a,1]",
    "optimizer.betas=[0.9]": "optimizer.betas: must have 2 values, got [0.9]",
    "optimizer.betas=[0.9,1]": "optimizer.betas: must be < 1, got 1",
    "optimizer.momentum=0.9": (
        "optimizer.momentum: no such key of optimizer=adam; its keys: schedule, warmup_steps, clip_norm, lr, weight_decay,"
        " fused, foreach, betas, eps"
    ),
    "optimizer.fused=true optimizer.foreach=true": "optimizer.foreach: and fused exclude each other, got both",
    "optimizer.clip_norm=0": "optimizer.clip_norm: must be > 0, got 0",
    "model=own": "model._target_: has no default: give it a value",
    "model=own model._target_=": "model._target_: must be package.module.name, got nothing",
    "model=own model._target_=torch.nn": "model._target_: torch.nn is a module, not a class or a function",
    "optimizer._target_=torch.optim.RMSprop":
        "optimizer._target_: torch.optim.RMSprop does not take the keys of optimizer=adam: add optimizer=own",
    "++model._target_=torch.nn.Linear":
        "model._target_: torch.nn.Linear does not take the keys of model=gpt2-tiny: add model=own",
    "model._target_=mdcs.gone.Vit":
        "model._target_: mdcs.gone.Vit: no module mdcs.gone; did you mean experiments.tasks.library.Vit?",
    "budget.limit=???": "budget.limit: has no default: give it a value",
    "data=own data._target_=builtins.list data.collate=3": "data.collate: must be null or a mapping with _target_, got 3",
    "model.layers=0": "model.layers: must be >= 1, got 0",
    "model.depth=2": (
        "model.depth: no such key of model=gpt2-tiny; its keys: name, wrap, wrap_min_params, frozen, norms_fp32, sequence,"
        " vocab, tie, weights, layers, width, heads, dropout, checkpointing"
    ),
    "model.checkpointing=auto": "model.checkpointing: must be true or false, got auto",
    "batch.find=most": "batch.find: must be one of largest, fastest; got most",
    "batch.find=largest": "batch.find: largest needs a budget in bytes, such as budget=40GiB; got budget=none",
    "batch.find=largest budget=floor+10%":
        "batch.find: largest needs a budget in bytes, such as budget=40GiB; got budget=floor+10%",
    "batch.at_most=8": "batch.at_most: has no effect without batch.find, got 8",
    "batch.find=fastest budget=1GiB batch.profiles=[0]": "batch.profiles: must be >= 1, got 0",
    "batch.find=fastest budget=1GiB batch.profiles=[2] profile=gpt3-1024":
        "batch.profiles: are measured, and the profile is another one; got [2]",
    "model.width=10 model.heads=3": "model.heads: must divide width=10, got 3",
    "model.vocab=100": "data: stdlib_bytes needs a vocabulary of 256, the model has 100",
    "model.weights=/no/such/folder": "model.weights: must be a folder with a model's config.json, or a name on the hub, got "
    "/no/such/folder",
    "model=llama-tiny model.kv_heads=3": "model.kv_heads: must divide heads=4, got 3",
    "model=vit-tiny model.patch=5 data=synthetic": "model.patch: must divide image=32, got 5",
    "model=bert-tiny-pairs data=stdlib_bytes":
        "data: stdlib_bytes gives tokens, the model reads pairs of sentences; use another source, or synthetic",
    "data=nli": "data: nli gives pairs of sentences, the model reads tokens; use another source, or synthetic",
    "model=bert-tiny-pairs data=nli model.vocab=256": "data: nli needs a vocabulary of 259, the model has 256",
    "model=bert-tiny-pairs data=nli model.classes=2": "data: nli has 3 classes, the model has 2",
    "model=bert-tiny-pairs data=nli data.path=none.jsonl": "data.path: no such file or folder: none.jsonl",
    "model=bert-tiny-pairs data=nli data.tokenizer=./none": "data.tokenizer: no such file or folder: ./none",
    "model=gpt2-tiny data=text": "data.path: is needed: a name on the hub, or a file or folder here",
    "model.norms_fp32=true": "model.norms_fp32: has no effect with run.precision=fp32, got true",
    "model.frozen=5": "model.frozen: must be a list, each value text, got 5",
    "model=mlp data=stdlib_bytes": "data: stdlib_bytes gives tokens, the model reads images; use another source, or synthetic",
    "model=timed data=stdlib_bytes": "data: stdlib_bytes gives tokens, the model reads images; use another source, or synthetic",
    "data=digits": "data: digits gives images, the model reads tokens; use another source, or synthetic",
    "data.batch_size=0": "data.batch_size: must be >= 1, got 0",
    "tracker.project=x": "tracker.project: no such key of tracker=none; it has none",
    "profile.path=/no/such/file": "profile.path: no such file: /no/such/file",
    "profile.path=x profile.refresh=true": "profile.refresh: measures a profile, and profile.path=x is one",
    "profile.layers=2": "profile.layers: has no effect with profile.name=measured, got 2",
    "profile.group=node": "profile.group: has no effect with profile.name=measured, got node",
    "profile=gpt3-1024 profile.group=rack": "profile.group: must be one of node, world; got rack",
    "profile=gpt3-1024 profile.efficiency=2": "profile.efficiency: must be <= 1, got 2",
    "profile=gpt3-1024 profile.nodes=null": "profile.nodes: is needed with profile.name=analytic, got null",
    "engine=horovod": (
        "engine: no such option horovod; options: dataparallel, ddp, deepspeed, fairscale, fairscale_fsdp, fsdp2, mdcs"
    ),
    "engine=fairscale_fsdp": "engine: fairscale_fsdp needs cluster.device=cuda, got cpu",
    "engine=dataparallel": "engine: dataparallel needs cluster.device=cuda, got cpu",
    "engine=dataparallel cluster=cuda": (
        "cluster.ranks: must be 1 with engine=dataparallel: one process, all devices; got 2"
    ),
    "engine=ddp engine.bucket_mib=0": "engine.bucket_mib: must be > 0, got 0",
    "engine=ddp engine.bucket_mib=null": "engine.bucket_mib: must be a number, got null",
    "engine.bucket_mib=4": "engine.bucket_mib: no such key of engine=mdcs; it has none",
    "engine=deepspeed engine.stage=4": "engine.stage: must be <= 3, got 4",
    "engine=fsdp2 engine.reshard=group": (
        "engine.reshard_group: goes with reshard=group and no other; got group with null"
    ),
    "engine=fsdp2 engine.reshard_group=2": (
        "engine.reshard_group: goes with reshard=group and no other; got always with 2"
    ),
    "engine=fsdp2 engine.reshard=group engine.reshard_group=3": "engine.reshard_group: must divide cluster.ranks=2, got 3",
    "engine=fsdp2 engine.plan=/no/such engine.prefetch=1": (
        "engine.plan: says what to reshard and prefetch itself; got reshard=always, prefetch=1"
    ),
    "engine=fsdp2 engine.plan=/no/such": (
        "engine.plan: is not a file of mdcs export: [Errno 2] No such file or directory: '/no/such'"
    ),
    "engine=ddp strategy=fsdp": "strategy: has no effect with engine=ddp, got fsdp",
    "engine=ddp strategy=joint": "strategy: has no effect with engine=ddp, got joint",
    "engine=fsdp2 scheduler=dear": "scheduler: has no effect with engine=fsdp2, got dear",
    "engine=fsdp2 collectives=ring": "collectives.algorithm: has no effect with engine=fsdp2, got ring",
    "engine=ddp run.cross_iteration=false": "run.cross_iteration: has no effect with engine=ddp, got false",
    "engine=ddp run.save_every=5": "run.save_every: must be null with engine=ddp, which writes no checkpoints; got 5",
    "run.save_every=0": "run.save_every: must be >= 1, got 0",
    "run.keep=0": "run.keep: must be >= 1, got 0",
    "engine=ddp link.depth=3": "link.depth: has no effect with engine=ddp, got 3",
    "engine=ddp profile.refresh=true": "profile.refresh: has no effect with engine=ddp, got true",
    "engine=ddp budget=floor+10%": "budget.limit: has no effect with engine=ddp, got floor+10%",
    "engine=ddp budget=1GiB budget.reserve_mib=1": "budget.reserve_mib: has no effect with engine=ddp, got 1",
    "engine=fairscale link=emulated": (
        "link.name: an emulated link paces mdcs alone, not the messages of engine=fairscale"
    ),
    "nothing": "nothing: is not KEY=VALUE, without spaces around the =",
    "model.frozen=[a": "model.frozen: cannot be read (no viable alternative at input '[a'), got model.frozen=[a",
    "runs.steps=3": "runs.steps: no such key; did you mean run.steps?",
}


@pytest.mark.parametrize(("overrides", "message"), a_third(WRONG.items()), ids=WRONG)
def test_a_wrong_value_is_one_line_with_its_key(overrides, message):
    with pytest.raises(ConfigError) as caught:
        composed(*overrides.split())
    assert str(caught.value) == message
    assert caught.value.key == message.partition(":")[0]


def test_no_limit_is_left_unchecked():
    """A misspelt limit in a field's metadata would be ignored in silence."""
    known = {"about", *LIMITS, "used_by", "needed_by", "profiled"}
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
    path = Path(__file__).parents[1] / "profile.json"
    known = ("model=gpt2-tiny", "link=emulated", f"profile.path={path}", "budget=1GiB")
    made = composed(*known)
    there = replace(made, profile=replace(made.profile, path=None))
    checks.save(there, tmp_path / "config.yaml")
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


def profile_of(tmp_path: Path, *overrides: str, emulated: bool = False, shaped_link: str = "") -> str:
    """A profile as a job with these overrides would have measured it."""
    text = json.loads(PROFILE.read_text())
    text["about"] = job_identity(composed(*overrides)) | {"shaped_link": shaped_link}
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


def test_algorithms_other_than_a_profile_was_measured_with_are_refused_but_for_an_emulated_link(tmp_path):
    profile = profile_of(tmp_path)
    assert composed(profile, "collectives=ring").collectives.named == "ring"
    with pytest.raises(ConfigError) as error:
        composed(profile, "collectives=native")
    measured = f"{profile.partition('=')[2]} was measured with ring, got native"
    assert str(error.value) == f"collectives.algorithm: {measured}"
    assert composed(profile, "collectives=native", "link=emulated").collectives.named == "native"


def test_native_collectives_are_for_every_device():
    assert composed("collectives=native", "cluster=cuda").collectives.named == "native"
    assert composed("cluster=cuda").collectives.named is None


def test_a_profile_written_by_hand_need_not_say_what_it_was_measured_with():
    assert composed(f"profile.path={PROFILE}", "model.layers=3").profile.path == str(PROFILE)


@pytest.mark.parametrize(
    ("override", "reason"),
    a_third([
        ("model.layers=3", "model.layers 2; this job has 3"),
        ("data.batch_size=8", "data.batch_size 4; this job has 8"),
        ("model.wrap=leaf", "model.wrap block; this job has leaf"),
        ("model.frozen=[*.bias]", "model.frozen []; this job has [*.bias]"),
        ("optimizer=adamw", "optimizer experiments.tasks.optimizers.Adam; this job has experiments.tasks.optimizers.AdamW"),
        ("optimizer.foreach=true", "optimizer.foreach null; this job has true"),
        ("cluster.ranks=3", "cluster.ranks 2; this job has 3"),
        ("run.precision=fp64", "run.precision fp32; this job has fp64"),
    ]),
)  # fmt: skip
def test_a_profile_of_another_job_is_refused(tmp_path, override, reason):
    profile = profile_of(tmp_path)
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


def test_a_profile_without_the_link_does_not_plan_for_a_real_one(tmp_path):
    with pytest.raises(ConfigError, match="profile.path: .* has not measured the link: it was emulated"):
        composed(profile_of(tmp_path, emulated=True))


def test_a_profile_of_a_class_that_has_another_name_now_is_to_be_measured_anew(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"about": {"model": "experiments.tasks.gpt2.Gpt2"}}))
    with pytest.raises(ConfigError) as error:
        composed(f"profile.path={path}")
    assert str(error.value) == (
        f"profile.path: {path} was measured with other code than is here: leave it out to measure anew"
        " (model._target_: experiments.tasks.gpt2.Gpt2: no module experiments.tasks.gpt2;"
        " did you mean experiments.tasks.library.Gpt2?)"
    )


def test_what_is_no_profile_is_refused():
    with pytest.raises(ConfigError, match="profile.path: .*setup.cfg is not a profile.json: Expecting value"):
        composed("profile.path=setup.cfg")


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
    ("chosen", "name"),
    [("model=mlp", "synthetic"), ("model=timed", "synthetic"), ("model=bert-tiny", "stdlib_bytes")],
)
def test_a_model_chooses_its_data_where_the_config_does_not(chosen, name):
    data = composed(chosen, "data.batch_size=3").data
    assert (data.name, data.batch_size) == (name, 3)


def test_the_warm_up_that_nobody_asked_for_is_shorter_than_the_run():
    assert [composed(f"run.steps={steps}").run.warmup_steps for steps in (1, 5, 6)] == [0, 4, 5]
