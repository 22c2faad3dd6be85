"""Plans that tell the costs of messages apart, and their runs before training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from mdcs.model.units import ByLeaf, partition
from mdcs.profile.link import Link
from mdcs.profile.schema import Profile
from mdcs.profiler.calibration import calibration_plans, measure_contention
from mdcs.profiler.consensus import merge_profiles
from mdcs.profiler.model_profile import measure_profile
from mdcs.sizes import MIB

from ..profiles import chain

GUESS = Link.uniform(1.0, 100.0)
PROFILE = chain(*[3 * MIB // 2] * 8, link=GUESS, forward_s=0.03, backward_s=0.06)


def test_the_plans_tell_costs_apart() -> None:
    plans = calibration_plans(PROFILE)
    kinds = {str(m.kind) for plan in plans for m in plan.messages}
    sent: dict[int, list[int]] = {}
    for plan in plans:
        sent.setdefault(sum(plan.sent_bytes().values()), []).append(len(plan.messages))
    assert kinds == {"AR", "RS", "AG_F", "AG_B"} and 4 <= len(plans) <= 6
    assert any(max(counts) >= 4 * min(counts) for counts in sent.values())


@pytest.mark.parametrize("sizes", [[MIB] * 8, [1000] * 8, [10, 10**7, 300, 10**6]])
def test_plans_of_any_sizes_of_units_differ_in_their_number_of_messages(sizes: list[int]) -> None:
    counts = [len(plan.messages) for plan in calibration_plans(chain(*sizes, link=GUESS))]
    assert max(counts) >= 3 * min(counts)


def test_calibration_plans_keep_a_budget() -> None:
    free = calibration_plans(PROFILE)
    budget = min(plan.prediction.peak_bytes for plan in free if plan.prediction)
    plans = calibration_plans(PROFILE, budget)
    assert all(plan.budget == budget and plan.prediction and plan.prediction.peak_bytes <= budget for plan in plans)


def measure() -> tuple[Profile, bool]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64), torch.nn.Dropout(), torch.nn.Linear(64, 8))
    state, random_state = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    optimizer, units = torch.optim.Adam(model.parameters()), partition(model, ByLeaf())

    def step() -> torch.Tensor:
        return model(torch.ones(256, 64)).square().mean()

    world = dist.get_world_size() if dist.is_initialized() else 1
    profile = merge_profiles(measure_profile(model, units, step, optimizer, world=world, link=GUESS))
    measured = measure_contention(profile, model, units, step, optimizer, seconds=0.0)
    same = all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    same = same and torch.equal(torch.random.get_rng_state(), random_state) and step().requires_grad
    return measured, same and all(p.grad is None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:predictions are off")  # steps of a millisecond
def test_ranks_agree_on_what_they_measure_and_leave_the_model_alone(two) -> None:  # type: ignore[no-untyped-def]
    (first, untouched), (second, also_untouched) = two.run(measure)
    assert untouched and also_untouched
    assert first == second and first.errors == second.errors != {} and first.calibration_runs
