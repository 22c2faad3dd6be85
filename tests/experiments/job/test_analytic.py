"""Calculated profiles: seconds, bytes and the hierarchical network, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from experiments.job.analytic import COLLECTIVES, Device, Network, Transformer, analytic_profile
from mdcs.plan.job import recomputing
from mdcs.planner.feasibility import InfeasibleBudget
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile

SMALL = Transformer(layers=2, width=8, heads=2, sequence=4, vocab=10, batch=3, checkpointing=False)
DEVICE = Device(peak_flops=1000.0, efficiency=0.5, memory_rate=56.0)
# 3 nodes of 2: an intra-node hop takes 1 s and a byte 1 s; across nodes 10 and 12.
NETWORK = Network(3, 2, 1.0, 1.0, 10.0, 12.0)
GPT3 = Transformer(layers=96, width=12288, heads=96, sequence=2048, vocab=50257)
A100 = Device(312e12, 0.5, 1.6e12)
DGX = Network(128, 8, 2e-6, 1 / 250e9, 5e-6, 1 / 25e9)


def seconds(network: Network, group: str, kind: Kind, size: int) -> float:
    """Seconds of one message of ``size`` bytes, as the simulator takes it."""
    link = network.link(group)
    return link.end(kind, COLLECTIVES.sent(kind, size, network.group_size(group)), 0.0, 0.0)


def test_a_message_over_the_world_goes_around_the_node_and_across_nodes():
    # S = 60: one hop and 30 bytes within the node, two hops and 60 · 2/3 / 2 = 20 bytes across.
    gather = (1 + 30) + (20 + 20 * 12)
    assert seconds(NETWORK, "world", Kind.AG_F, 60) == pytest.approx(gather)
    assert seconds(NETWORK, "world", Kind.RS, 60) == pytest.approx(gather)
    assert seconds(NETWORK, "world", Kind.AR, 60) == pytest.approx(2 * gather)


def test_within_a_node_gathers_are_fast_and_reductions_go_on_across_nodes():
    inside, across = 1 + 30, 20 + 20 * 12
    assert seconds(NETWORK, "node", Kind.AG_F, 60) == seconds(NETWORK, "node", Kind.AG_B, 60) == pytest.approx(inside)
    assert seconds(NETWORK, "node", Kind.RS, 60) == pytest.approx(inside + 2 * across)
    assert seconds(NETWORK, "node", Kind.AR, 60) == pytest.approx(2 * inside + 2 * across)


def test_one_node_is_its_own_world():
    one = replace(NETWORK, nodes=1)
    assert one.link("node") == one.link("world")


def test_slots_take_the_seconds_and_bytes_of_their_operations():
    profile = analytic_profile(SMALL, DEVICE, NETWORK)
    tokens, inside = 12, 12 * (34 * 8 + 5 * 2 * 4)
    forward = tokens * (24 * 64 + 4 * 4 * 8) / 500
    head = 2 * tokens * 8 * 10 / 500
    assert [s.seconds for s in profile.slots] == pytest.approx([0, forward, forward, head, 2 * head, 2 * forward, 2 * forward, 0])
    output = 2 * tokens * 8
    assert [s.live for s in profile.slots[:4]] == [0, output, output + inside, output + 2 * inside]
    assert profile.slots[3].peak == output + 2 * inside + 6 * tokens * 10
    assert [u.numel for u in profile.units] == [(10 + 4 + 2) * 8, 12 * 64 + 13 * 8, 12 * 64 + 13 * 8]
    assert all(slot.peak >= slot.live for slot in profile.slots)
    assert all(slot.peak >= after.live for slot, after in zip(profile.slots, profile.slots[1:], strict=False))


def test_checkpointing_computes_the_forward_again_and_keeps_outputs_only():
    kept, recomputed = (analytic_profile(replace(SMALL, checkpointing=c), DEVICE, NETWORK) for c in (False, True))
    assert recomputed.slots[5].seconds == pytest.approx(1.5 * kept.slots[5].seconds)
    assert recomputed.slots[3].live == 3 * 2 * 12 * 8
    assert max(s.peak for s in recomputed.slots) < max(s.peak for s in kept.slots)


def test_recomputation_of_all_blocks_is_checkpointing():
    kept, checkpointed = (analytic_profile(replace(SMALL, checkpointing=c), DEVICE, NETWORK) for c in (False, True))
    assert recomputing(kept, ("none", "full", "full")).slots == checkpointed.slots and not checkpointed.recompute


def test_selective_recomputation_frees_what_is_inside_of_attention():
    kept = analytic_profile(replace(SMALL, checkpointing=False), DEVICE, NETWORK)
    slots = recomputing(kept, ("none", "selective", "none")).slots
    assert kept.slots[3].live - slots[3].live == 5 * 12 * 2 * 4  # tokens, heads, sequence
    assert slots[6].peak == kept.slots[6].peak
    assert slots[6].seconds == pytest.approx(kept.slots[6].seconds + 4 * 12 * 4 * 8 / 500)


def test_nodes_share_the_optimizer_state_of_a_shard():
    world, node = (analytic_profile(SMALL, DEVICE, NETWORK, group=group) for group in ("world", "node"))
    assert (world.world, node.world) == (6, 2)
    assert (world.optimizer.state_tensors, node.optimizer.state_tensors) == (6, 2)
    # 28 bytes of memory traffic per parameter, at 56 per second.
    assert (world.optimizer.seconds_per_element, node.optimizer.seconds_per_element) == (0.5, pytest.approx(0.5 / 3))


def test_an_analytic_profile_is_stored_like_any_other():
    profile = analytic_profile(SMALL, DEVICE, NETWORK, group="node")
    assert Profile.from_json(profile.to_json()) == profile


def test_gpt3_fits_1024_devices_in_pieces_only():
    for group, least in (("world", 18 << 30), ("node", 58 << 30)):
        profile = analytic_profile(GPT3, A100, DGX, group=group)
        assert sum(u.numel for u in profile.units) == pytest.approx(175e9, rel=0.01)
        plan = make_plan(profile, Uniform("fsdp"), Wfbp(), budget=72 << 30)
        assert plan.prediction is not None
        assert least < plan.prediction.peak_bytes < 72 << 30
        with pytest.raises(InfeasibleBudget):
            make_plan(profile, Uniform("sdp"), Wfbp(), budget=72 << 30)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: replace(SMALL, layers=0), "layers must be > 0, got 0"),
        (lambda: replace(DEVICE, efficiency=1.5), "efficiency must be <= 1, got 1.5"),
        (lambda: NETWORK.link("rack"), "sharding group must be node or world, got 'rack'"),
        (lambda: replace(NETWORK, per_node=1).link("node"), "a sharding group needs at least 2 devices, a node has 1"),
    ],
)
def test_what_cannot_be_is_refused(make, reason):
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == reason
