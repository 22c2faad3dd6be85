"""What every algorithm sends and holds, by the formulas of the literature."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from mdcs.profile.algorithms import ALGORITHMS, KIND, OPERATION, Collectives
from mdcs.profile.contents import Profile
from mdcs.profile.link import Kind
from tests.mdcs.profiles import chain

AR, RS, AG_F, AG_B, *_ = Kind


def using(kind: Kind, algorithm: str, backend: str = "gloo") -> Collectives:
    return replace(Collectives.default(backend), **{OPERATION[kind]: algorithm})


@pytest.mark.parametrize(
    ("kind", "algorithm", "sent", "buffer"),
    [
        # Of 1,200 bytes on 2, 3 and 4 ranks a part is 600, 400 and 300.
        (AR, "native", (1200, 1600, 1800), (0, 0, 0)),
        (AR, "ring", (1200, 1600, 1800), (600, 400, 300)),
        (AR, "direct", (1200, 1600, 1800), (600, 800, 900)),
        (AR, "reduce_broadcast", (1200, 2400, 2400), (1200, 1200, 1200)),  # the root sends once, twice, twice
        (RS, "all_to_all", (600, 800, 900), (1200, 1200, 1200)),
        (RS, "native", (1200, 1600, 1800), (0, 0, 0)),  # an all-reduce
        (RS, "ring", (600, 800, 900), (600, 400, 300)),
        (RS, "direct", (600, 800, 900), (600, 800, 900)),
        (AG_F, "direct", (600, 800, 900), (0, 0, 0)),
        (AG_F, "broadcast", (600, 800, 900), (0, 0, 0)),
        (AG_B, "native", (600, 800, 900), (1200, 1200, 1200)),
        (AG_B, "ring", (600, 800, 900), (0, 0, 0)),
    ],
)
def test_bytes(kind: Kind, algorithm: str, sent: tuple[int, ...], buffer: tuple[int, ...]) -> None:
    collectives = using(kind, algorithm)
    assert tuple(collectives.sent(kind, 1200, world) for world in (2, 3, 4)) == sent
    assert tuple(collectives.buffer(kind, 1200, world) for world in (2, 3, 4)) == buffer


def test_nccl_copies_nothing_and_sends_no_more_than_necessary() -> None:
    nccl = Collectives.default("nccl")
    assert [nccl.sent(kind, 1200, 3) for kind in (AR, RS, AG_F, AG_B)] == [1600, 800, 800, 800]
    assert [nccl.buffer(kind, 1200, 3) for kind in (AR, RS, AG_F, AG_B)] == [0, 0, 0, 0]


@pytest.mark.parametrize("backend", ALGORITHMS)
def test_one_rank_sends_and_holds_nothing(backend: str) -> None:
    for operation, names in ALGORITHMS[backend].items():
        for name in names:
            kind = KIND[operation]
            collectives = using(kind, name, backend)
            assert (collectives.sent(kind, 1200, 1), collectives.buffer(kind, 1200, 1)) == (0, 0)


def test_the_kinds_of_a_gather_share_an_algorithm() -> None:
    assert [Collectives("ring", "native", "broadcast").of(kind) for kind in (AR, RS, AG_F, AG_B)] == [
        "ring", "native", "broadcast", "broadcast",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"all_reduce": "rng"}, "all_reduce must be native or ring or direct or reduce_broadcast on gloo, got 'rng'"),
        ({"all_gather": "all_to_all"}, "all_gather must be broadcast or native or ring or direct on gloo, got 'all_to_all'"),
        ({"backend": "nccl"}, "reduce_scatter must be native on nccl, got 'all_to_all'"),
        ({"backend": "mpi"}, "backend must be gloo or nccl, got 'mpi'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"collectives: {message}"):
        Collectives(**wrong)


def test_a_profile_keeps_them_and_a_plan_is_another_with_others() -> None:
    profile = replace(chain(10), collectives=Collectives("ring", "ring", "ring"))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile != chain(10) and hash(profile) != hash(chain(10))
    data = json.loads(profile.to_json())
    assert data["collectives"] == asdict(profile.collectives)
    data["collectives"]["all_reduce"] = "rng"
    with pytest.raises(ValueError, match="all_reduce must be"):
        Profile.from_dict(data)
