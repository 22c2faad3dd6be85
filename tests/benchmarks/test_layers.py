"""Profiles of calculated layers: slots, units and recomputation, against numbers worked out by hand."""

from dataclasses import replace

from benchmarks.layers import Layer, Precision, layers_profile
from mdcs.plan.job import Job, recomputing
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.link import Link
from mdcs.profile.schema import Optimizer, Profile

LINK = Link((0.0,) * 4, (1e-9,) * 4, 1)
CHAIN = (
    Layer("root", 40, 0.0, output=8),
    Layer("block.0", 100, 30.0, kept=20, output=8, cheap=5, workspace=3),
    Layer("block.1", 100, 30.0, kept=20, output=8, cheap=5, workspace=3),
    Layer("root", 60, 10.0, kept=12, workspace=6),
)


def profile(interference: float = 0.0) -> Profile:
    return layers_profile(
        CHAIN, 10.0, 2, LINK, precision=Precision(2, 4, 4), optimizer=Optimizer("adam", 2), interference=interference
    )


def test_layers_of_one_name_share_a_unit():
    units = {unit.name: (unit.numel, unit.forward, unit.backward) for unit in profile().units}
    assert units == {"root": (100, (0, 3), (0, 3)), "block.0": (100, (1, 1), (2, 2)), "block.1": (100, (2, 2), (1, 1))}


def test_backward_takes_twice_the_forward():
    assert [slot.seconds for slot in profile().slots] == [0, 3, 3, 1, 2, 6, 6, 0]


def test_what_a_layer_keeps_is_live_until_its_backward_has_run():
    slots = profile().slots
    assert [slot.live for slot in slots] == [0, 8, 28, 48, 52, 48, 28, 8]
    # The first block keeps 20 and gives 8, in 3 of workspace; the head keeps 12 beside 40 and needs 6.
    assert [slot.peak for slot in slots] == [8, 31, 51, 58, 66, 59, 39, 8]


def test_recomputed_blocks_keep_their_input_only():
    full = recomputing(profile(), ("none", "full", "full")).slots
    assert [slot.live for slot in full[1:4]] == [8, 16, 24]  # inputs of 8, and the output of the last
    assert full[5].seconds == 6 + 3
    selective = recomputing(profile(), ("none", "selective", "none")).slots
    assert selective[3].live == 48 - 5 and selective[6].seconds == 6


def test_what_selective_recomputation_repeats_takes_its_time():
    [root, first, *rest] = CHAIN
    told = layers_profile(
        (root, replace(first, repeated=10.0), *rest), 10.0, 2, LINK, precision=Precision(), optimizer=Optimizer("adam", 2)
    )
    assert recomputing(told, ("none", "selective", "none")).slots[6].seconds == 6 + 1


def test_masters_are_what_shards_hold():
    plan = make_plan(Job(profile(), cross_iteration=False), Uniform("fsdp"), Wfbp())
    memory = plan.prediction.memory
    assert memory["parameters"] == 0 and memory["optimizer"] == 300 / 2 * (4 + 8)


def test_messages_slow_computing():
    quiet, disturbed = (make_plan(profile(i), Uniform("fsdp"), Wfbp()).prediction for i in (0.0, 0.5))
    assert quiet.step_s < disturbed.step_s < quiet.step_s + 0.5 * quiet.communication_s + 1e-12
