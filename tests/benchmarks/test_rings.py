"""Links of NCCL's rings, against times worked out by hand and measured."""

from dataclasses import replace

import pytest

from benchmarks import calculated
from benchmarks.rings import Cluster
from mdcs.profile.link import Collectives, Kind
from mdcs.profile.schema import Profile

NCCL = Collectives.default("nccl")
PASCAL = Cluster(4, 4, 10e9, 25e9 / 8, cards=1, nvlink=False)
DGX = Cluster(16, 8, 235e9, 25e9, cards=8)


def seconds(cluster: Cluster, kind: Kind, size: int) -> float:
    """Seconds of one message of ``size`` bytes, as the simulator takes it."""
    link = cluster.link(size)
    return link.end(kind, NCCL.sent(kind, size, cluster.world, cluster.per_node), 0.0, 0.0)


def test_devices_of_a_node_share_its_card():
    # 553 MB around 16 devices: 15/16 twice, through 25 Gbit/s of which 0.96 are reached.
    size = 553_430_176
    alone = 2 * 15 / 16 * size / (25e9 / 8 * 0.96)
    assert seconds(PASCAL, Kind.AR, size) == pytest.approx(alone, rel=0.001)
    assert seconds(replace(PASCAL, cards=2), Kind.AR, size) == pytest.approx(alone / 2, rel=0.002)


def test_within_a_node_the_network_does_not_matter():
    one = replace(PASCAL, nodes=1)
    assert one.link(1 << 20) == replace(one, card_rate=1.0).link(1 << 20)
    assert one.link(1 << 20).per_node == 0


def test_every_step_of_the_ring_is_a_hop():
    # 127 steps, 15 of them across nodes: LL128 is the faster for few bytes, and starts in 10 µs.
    assert seconds(DGX, Kind.AG_F, 0) == pytest.approx(10e-6 + 112 * 1.9e-6 + 15 * 4e-6)
    assert seconds(DGX, Kind.AR, 0) == pytest.approx(10e-6 + 2 * (112 * 1.9e-6 + 15 * 4e-6))


def test_large_messages_take_the_protocol_of_the_higher_rate():
    small, large = DGX.link(1 << 20), DGX.link(1 << 30)
    assert small.beta_of(Kind.RS) == pytest.approx(large.beta_of(Kind.RS) / 0.92)
    assert small.alpha_of(Kind.RS) < large.alpha_of(Kind.RS)


def test_a_hybrid_reduction_goes_through_the_cards_with_a_shard():
    # 1/8 of the bytes twice around 16 nodes, by 8 devices that share 8 cards; gathers stay within the node.
    size = 8 << 30
    inside, across = size * 7 / 8 / 235e9, 2 * size / 8 * 15 / 16 / (25e9 * 0.96)
    assert seconds(DGX, Kind.RS_N, size) == pytest.approx(inside + across, rel=0.01)
    assert seconds(DGX, Kind.AG_F_N, size) == pytest.approx(inside, rel=0.01)


def test_eight_h100_gather_nearly_as_fast_as_measured():
    one = Cluster(1, 8, 370e9, 50e9, cards=8)
    for mib, measured in ((8, 43.4e-6), (32, 118.9e-6), (128, 385.3e-6)):  # Megatron-LM issue 5596
        assert seconds(one, Kind.AG_F, mib << 20) == pytest.approx(measured, rel=0.2)


def test_a_cluster_that_one_does_not_have_is_planned_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["calculated", str(tmp_path / "it.json"), "--model", "Llama-3-8B", "--devices", "64"])
    calculated.main()
    profile = Profile.from_json((tmp_path / "it.json").read_text())
    assert (profile.world, len(profile.units), profile.about) == (64, 33, {"calculated": "Llama-3-8B on 64 h100-80"})
    states = profile.world, profile.optimizer.state_tensors, {unit.master_dtype for unit in profile.units}
    assert states == (64, 2, {"float32"}) and profile.optimizer.seconds_per_element > 0
