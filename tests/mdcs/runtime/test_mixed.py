"""Units of two types: bitwise DDP's under every strategy, to the byte in the ledger, and whole in whatever is taken out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.test_memory import exact_peaks, measure
from tests.mdcs.runtime.test_precision import beside_a_plain_loop, check
from tests.mdcs.runtime.training import How, Job, compare_all, parallel_for, setup, train

STRATEGIES = ("dp", "zero2", "sdp", "fsdp")
SCHEDULERS = ("sequential", "wfbp", "fusion", "mg_wfbp", "partitioning", "priority", "dear")


def test_every_strategy_and_scheduler_trains_as_ddp_does(two: Ranks) -> None:
    jobs = (Job("mixed", steps=6), Job("mixed", 2, "adamw", steps=6))
    cases = [(jobs[i % 2], How(STRATEGIES[i % 4], name, bytes=200)) for i, name in enumerate(SCHEDULERS)]
    cases.append((Job("wider", 2, "sgd", steps=6), How("greedy", "priority", budget=1.1, bytes=200)))
    for results in two.run(compare_all, cases, timeout_s=120):
        assert [case for case, result in zip(cases, results, strict=True) if not result["bitwise"]] == []


@pytest.mark.parametrize(
    ("job", "strategy"),
    [(Job("mixed", 2, "adamw"), s) for s in ("zero2", "fsdp")] + [(Job("mixed", half="masters"), s) for s in ("dp", "sdp")],
    ids=["plain-zero2", "plain-fsdp", "masters-dp", "masters-sdp"],
)
def test_the_ledger_is_exact(two: Ranks, job: Job, strategy: str) -> None:
    for rank in two.run(measure, job, How(strategy, "fusion", bytes=200), {}):
        exact_peaks(rank)


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_masters_are_of_the_narrow_type_alone(two: Ranks, strategy: str) -> None:
    job = Job("mixed", half="masters", steps=8)
    check(two.run(beside_a_plain_loop, job, How(strategy, "priority"), 1.0), "bfloat16", "float32")


def taken_out(strategy: str) -> dict[str, Any]:
    job = Job("mixed", steps=3)
    with parallel_for(job, How(strategy, "wfbp")) as (made, parallel, optimizer):
        train(job, made, parallel, optimizer)
        state = parallel.state_dict()
        with parallel.full_parameters(writeback=True):
            held = {name: p.detach().clone() for name, p in made.model.named_parameters()}
            with torch.no_grad():
                made.model.get_parameter("blocks.0.0.weight").add_(1)
        later = parallel.state_dict()
    model = made.model
    types = {name: p.dtype for name, p in setup("mixed").model.named_parameters()}
    changed = "blocks.0.0.weight"
    return {
        "types": {name: state[name].dtype for name in types} == types == {n: p.dtype for n, p in model.named_parameters()},
        "held": all(torch.equal(held[name], state[name]) for name in held),
        "changed": all(torch.equal(later[name], state[name] + (name == changed)) for name in types),
        "closed": all(torch.equal(p, later[name]) for name, p in model.named_parameters()),
    }


@pytest.mark.parametrize("strategy", ["zero2", "fsdp"])
def test_what_is_taken_out_has_every_parameter_in_its_type(two: Ranks, strategy: str) -> None:
    for found in two.run(taken_out, strategy):
        assert found == dict.fromkeys(found, True)
