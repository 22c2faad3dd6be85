"""A real job behind real links of a set rate: it runs like any other, and its profile has measured that rate."""

import io
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import analysis
from analysis.events import read_events
from experiments import profile as program
from experiments.config.schema import Config, ConfigError
from experiments.job.profiles import Profiles
from launch import network
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile
from tests.experiments import batch

pytestmark = pytest.mark.slow

RATE = 0.5  # slow enough to be reached on any machine
JOB = ("cluster=shaped", "model=mlp", "data=synthetic", "cluster.threads=1")
SMALL = ("collectives=ring", "run.steps=4", "run.unmeasured_steps=2", "run.profile_iterations=2")


def composed(*overrides: str, rate: float | str = RATE) -> Config:
    return batch.composed(*JOB, f"cluster.rate_gbit={rate}", *overrides)


def test_a_job_trains_behind_the_link_and_says_so(tmp_path):
    if why := network.refusal(RATE):
        pytest.skip(f"no shaped network: {why}")
    measured = (*SMALL[:-1], "run.profile_iterations=12")  # enough messages to tell seconds per byte from those per message
    outcome = batch.run_job(composed(*measured, "strategy=fsdp"), tmp_path, worker=None)
    assert outcome.ok, outcome.reason
    profile = Profile.from_json((tmp_path / "profile.json").read_text())
    for kind in (Kind.AR, Kind.AG_F, Kind.RS):
        rate = 8e-9 / profile.link.beta_of(kind)
        # The rate of the line that is fitted: after a pause the bucket's 128 KiB of a message's 257 pass at once, so that it may
        # seem twice as fast. How much slower it seems depends on what else has the cores.
        assert rate <= 2 * RATE, (kind, rate, profile.collectives)
    assert (profile.about["shaped_link"], profile.link.emulated) == ("0.5 Gbit/s", False)
    congestion = profile.about["congestion_control"]
    asked, start, *_ = read_events(tmp_path / "metrics.jsonl")
    assert (asked["shaped_gbit"], start["congestion_control"], start["emulated"]) == (RATE, congestion, False)
    assert congestion == network.congestion_control() != ""
    row = analysis.load_run(tmp_path).row()
    assert (row["status"], row["shaped_gbit"], row["congestion_control"]) == ("ok", RATE, congestion)
    printed = io.StringIO()
    analysis.print_table(analysis.runs(tmp_path), printed)
    assert "· 2 ranks · link shaped to 0.5 Gbit/s" in printed.getvalue()
    console = Console(width=120, record=True, file=io.StringIO())
    program.show(profile, console)
    assert f"link shaped to 0.5 Gbit/s ({congestion}): 2 messages in flight" in console.export_text()


def test_where_it_cannot_work_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(network, "_found", lambda program: None)
    folder = tmp_path / "job"
    with pytest.raises(ConfigError) as error:
        batch.run_job(composed(), folder)
    assert str(error.value) == "cluster.name: shaped is not possible here: needs the program ip (of iproute2)"
    assert not folder.exists()


def test_two_nodes_have_two_levels(tmp_path):
    if why := network.refusal(RATE):
        pytest.skip(f"no shaped network: {why}")
    nodes = ("cluster.ranks=4", "cluster.nodes=2", "strategy=hsdp", "cluster.timeout_s=200")
    config = composed(*SMALL, *nodes, rate=RATE / 4)  # slower than what four ranks on busy cores copy among themselves
    outcome = batch.run_job(config, tmp_path)
    assert outcome.ok, outcome.reason
    profile = Profile.from_json((tmp_path / "profile.json").read_text())
    link = profile.link
    assert (profile.about["hosts"], profile.about["network"]) == ("2", "")
    assert link.per_node == 2 and link.beta_of(Kind.AG_F_N) <= link.beta_of(Kind.AG_F)  # equal where all ranks wait for cores
    assert 8e-9 / link.beta_of(Kind.AG_F) <= RATE / 2
    assert analysis.load_run(tmp_path).row()["bytes_AG_B_N"] > 0


@pytest.mark.parametrize("nodes", [1, 4])
def test_without_nodes_nothing_is_sharded_within_one(tmp_path, nodes):
    config = composed("strategy=hsdp", "cluster.ranks=4", f"cluster.nodes={nodes}")
    with pytest.raises(ConfigError, match=f"strategy.each: hsdp shards within a node, .* got cluster.ranks=4 on {nodes}"):
        batch.run_job(config, tmp_path)


def test_a_profile_belongs_to_its_rate_and_congestion_control(tmp_path, monkeypatch):
    shutil.copy(Path(__file__).with_name("profile.json"), tmp_path)
    Profiles().keep(composed(), tmp_path)
    assert Profiles().find(composed("scheduler=dear")) is not None
    assert Profiles().find(composed(rate=1.0)) is None
    assert Profiles().find(composed("cluster=local", rate="null")) is None
    monkeypatch.setattr(network, "congestion_control", lambda: "another")
    assert Profiles().find(composed()) is None
