"""Jobs whose ranks somebody else starts have those ranks, and what asks for others is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.config import checks
from experiments.config.checks import Started, require_as_asked
from experiments.config.identity import about
from experiments.config.schema import ConfigError

THREE = Started("torchrun", 3, 1, "lo", print)
SIX = Started("srun", 6, 2, "eth0", print)
PROFILE = Path(__file__).parents[1] / "profile.json"


@pytest.fixture
def composed(monkeypatch):
    def compose(here, *overrides):
        monkeypatch.setattr(checks, "here", here)
        return checks.compose_config(["model=mlp", "data=synthetic", *overrides])

    return compose


@pytest.mark.parametrize(
    ("overrides", "here", "line"),
    [
        (["cluster.ranks=2"], THREE, "cluster.ranks: must be 3, as many as are started; got 2"),
        (["cluster.name=joined", "cluster.nodes=3"], SIX, "cluster.nodes: must be 2, as many as are started; got 3"),
        (["cluster.name=joined", "cluster.nodes=2"], THREE, "cluster.nodes: must be 1, as many as are started; got 2"),
        (["cluster=shaped"], THREE, "cluster.name: must be local: torchrun starts the ranks; got shaped"),
    ],
)
def test_other_ranks_than_were_started_are_refused(composed, overrides, here, line):
    with pytest.raises(ConfigError) as error:
        composed(here, *overrides)
    assert str(error.value) == line


def test_a_number_that_a_file_says_is_asked_for_like_an_override(composed):
    with pytest.raises(ConfigError):
        require_as_asked(composed(None, "cluster.ranks=4"), composed(THREE))


@pytest.mark.parametrize(("overrides", "here"), [([], THREE), (["cluster.ranks=6"], SIX)])
def test_the_ranks_that_were_started_are_those_of_the_job(composed, overrides, here):
    cluster, several = composed(here, *overrides).cluster, here.hosts > 1
    assert (cluster.name, cluster.ranks, cluster.nodes, cluster.network) == (
        "joined", here.ranks, 2 if several else None, "eth0" if several else None,
    )  # fmt: skip


def test_a_profile_of_other_ranks_or_of_another_network_than_are_here_is_refused(composed, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(PROFILE.read_text()) | {"world": 6, "about": about(composed(SIX))}))
    given = f"profile.path={path}"
    assert composed(SIX, given).cluster == composed(None, given).cluster == composed(SIX).cluster
    for here, reason in ((THREE, "cluster.ranks 6; this job has 3"),
                         (dataclasses.replace(SIX, network="lo"), "cluster.network eth0; this job has lo")):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            composed(here, given)
        assert str(error.value) == f"profile.path: {path} was measured with {reason}"
