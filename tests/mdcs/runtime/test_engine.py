"""A change of plan between two steps: what both plans share stays, and training goes on as DDP's."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import mdcs
from mdcs.runtime.messages import Messages
from mdcs.runtime.unshard import Unsharder
from mdcs.runtime.wire import Wire
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import How, Job, optimizer_for, plan_for, profile_of, reference, setup

SMALL = 100  # bytes of blocks: units are cut
PLANS = {
    "dp": How("dp"), "dp, in blocks": How("dp", "partitioning", bytes=SMALL), "zero2": How("zero2"),
    "zero2, later": How("zero2", "dear"), "zero2, in blocks": How("zero2", "priority", bytes=SMALL), "sdp": How("sdp"),
    "fsdp": How("fsdp", "sequential"), "fsdp, in blocks": How("fsdp", "partitioning", bytes=SMALL),
    "mix": How("random", "random", seed=3), "another mix": How("random", "random", seed=4),
}  # fmt: skip
ORDER = [
    "dp", "dp, in blocks", "zero2, in blocks", "zero2", "zero2, later", "fsdp", "sdp", "zero2", "dp", "fsdp, in blocks", "mix",
    "another mix", "dp", "mix", "mix", "dp, in blocks", "fsdp",
]  # fmt: skip
STAYS = [
    ("dp", "dp, in blocks"), ("dp, in blocks", "zero2, in blocks"), ("zero2", "zero2, later"), ("zero2, later", "fsdp"),
    ("fsdp", "sdp"), ("sdp", "zero2"), ("dp", "fsdp, in blocks"), ("dp", "mix"), ("mix", "mix"), ("dp, in blocks", "fsdp"),
]  # fmt: skip
"""Changes for which no rank needs what another one has."""
RECUT = ("zero2, in blocks", "zero2")
"""A change in which ranks exchange parts of units, and need no unit whole."""


def counted(patch: pytest.MonkeyPatch, owner: Any, name: str, found: list[str]) -> None:
    """Count the method's calls for units that several ranks share."""
    real = getattr(owner, name)

    def counting(self: Any, unit: int, *more: Any) -> Any:
        if self.storages[unit].parts > 1:
            found.append(name)
        return real(self, unit, *more)

    patch.setattr(owner, name, counting)


def changing(model: str, optimizer: str, micro_steps: int, double: bool = False) -> tuple[list[str], dict[Any, int], int]:
    """Differences to DDP after two steps under each plan; gathers by change of plan; process groups made for them."""
    made, job = setup(model, double), Job(model, micro_steps, optimizer=optimizer, steps=2 * len(ORDER), double=double)
    wanted, rank = reference(job), dist.get_rank()
    ours, units = optimizer_for(optimizer, made.model), mdcs.partition(made.model, made.policy)
    plans = {name: plan_for(job, how, profile_of(job, how, made, units, ours)) for name, how in PLANS.items()}
    gathers, groups, found = dict[tuple[str, str], int](), list[Any](), list[str]()
    losses, before, scheduler = [], ORDER[0], job.scheduler(ours)
    parallel = mdcs.parallelize(made.model, ours, plans[ORDER[0]], units, timeout_s=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *ranks, **options: groups.append(ranks))
        for name in ORDER:
            if losses:
                with pytest.MonkeyPatch.context() as counts:
                    counted(counts, Unsharder, "start_gather", found)
                    counted(counts, Wire, "gather", found)
                    counted(counts, Messages, "unshard_flat", whole := [])
                    parallel._change_plan(plans[name])
                gathers[before, name] = len(found)
                assert (before, name) != RECUT or whole == []
                found.clear()
            for _ in range(2):
                for micro in range(micro_steps):
                    loss = made.loss(made.model, made.batch(len(losses) // micro_steps, micro, rank)) / micro_steps
                    loss.backward()
                    losses.append(loss.item())
                ours.step()
                scheduler.step()
            before = name
        state = parallel.state_dict()
        records = [record.step for record in parallel.records(flush=True)]
        assert parallel.steps == job.steps and records == [job.steps - 1, job.steps]
        parallel.close()
    exact = {"rel": 0.0, "abs": 0.0} if dist.get_world_size() == 2 else {"rel": 1e-9, "abs": 1e-12}  # sums of three round
    out = [] if losses == pytest.approx(wanted.losses, **exact) else ["losses"]
    out += [
        name for name, value in wanted.state.items()
        if state[name].flatten().tolist() != pytest.approx(value.flatten().tolist(), **exact)
    ]  # fmt: skip
    return out, gathers, len(groups)


@pytest.mark.parametrize(
    ("model", "optimizer", "micro_steps"),
    [("tied", "adam", 1), ("twice", "sgd", 2), pytest.param("gpt2", "adamw", 1, marks=pytest.mark.slow)],
)
def test_a_change_of_plan_moves_only_what_changes(two: Ranks, model: str, optimizer: str, micro_steps: int):
    for differs, gathers, groups in two.run(changing, model, optimizer, micro_steps, timeout_s=100.0):
        assert differs == [] and groups == 0
        frozen = {("sdp", "zero2")} if model == "tied" else set()  # a frozen unit is gathered where it is not whole
        assert {change for change, count in gathers.items() if not count} == {*STAYS} - frozen


def test_parts_of_three_ranks_are_exchanged(three: Ranks):
    for differs, gathers, _ in three.run(changing, "tied", "adam", 1, True, timeout_s=100.0):
        assert differs == [] and gathers[RECUT] > 0
