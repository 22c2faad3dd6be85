"""Jobs whose ranks somebody else starts have those ranks, and what asks for others is refused."""

import pytest

from experiments.config import checks
from experiments.config.schema import ConfigError
from experiments.job.member import adapted
from experiments.job.started import require_as_asked
from launch.place import Place

THREE = Place(0, 3, 0, 3, 1, "127.0.0.1", 1, serves=True, starter="torchrun")
SIX = Place(0, 6, 0, 3, 2, "127.0.0.1", 1, serves=True, starter="srun")


def composed(*overrides):
    with checks.composing():
        return checks.compose_config(["model=mlp", "data=synthetic", *overrides])


@pytest.mark.parametrize(
    ("overrides", "place", "line"),
    [
        (["cluster.ranks=2"], THREE, "cluster.ranks: must be 3, as many as are started; got 2"),
        (["cluster.ranks=4"], THREE, "cluster.ranks: must be 3, as many as are started; got 4"),
        (["cluster.name=joined", "cluster.nodes=3"], SIX, "cluster.nodes: must be 2, as many as are started; got 3"),
        (["cluster.name=joined", "cluster.nodes=2"], THREE, "cluster.nodes: must be 1, as many as are started; got 2"),
    ],
)
def test_other_ranks_than_were_started_are_refused(overrides, place, line):
    config = composed(*overrides)
    with pytest.raises(ConfigError) as error:
        require_as_asked(config, adapted(config, place, ""), overrides)
    assert str(error.value) == line


def test_a_number_that_a_file_says_is_asked_for_like_an_override():
    config = composed("cluster.ranks=4")
    with pytest.raises(ConfigError):
        require_as_asked(config, adapted(config, THREE, ""))


@pytest.mark.parametrize(("overrides", "place"), [([], THREE), (["cluster.ranks=3"], THREE), (["cluster.ranks=6"], SIX)])
def test_the_ranks_that_were_started_are_those_of_the_job(overrides, place):
    config = composed(*overrides)
    made = adapted(config, place, "eth0")
    require_as_asked(config, made, overrides)
    several = place.hosts > 1
    assert (made.cluster.ranks, made.cluster.nodes, made.cluster.network) == (
        place.world, 2 if several else None, "eth0" if several else None,
    )  # fmt: skip


def test_a_cluster_that_starts_its_own_ranks_is_refused():
    config = composed("cluster=shaped", "cluster.rate_gbit=1")
    with pytest.raises(ConfigError, match="cluster.name: must be local: torchrun starts the ranks; got shaped"):
        adapted(config, THREE, "")
