"""Bytes that every algorithm sends and holds, by the formulas of the literature."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from mdcs.profile.algorithms import ALGORITHMS, Collectives
from mdcs.profile.link import Kind
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import chain

AR, RS, AG_F, AG_B, *_ = Kind


@pytest.mark.parametrize(
    ("kind", "algorithm", "sent", "buffer"),
    [
        # Of 1,200 bytes on 2, 3 and 4 ranks a part is 600, 400 and 300.
        (AR, "native", (1200, 1600, 1800), (0, 0, 0)),
        (AR, "ring", (1200, 1600, 1800), (600, 400, 300)),
        (RS, "native", (1200, 1600, 1800), (0, 0, 0)),  # an all-reduce
        (RS, "ring", (600, 800, 900), (600, 400, 300)),
        (AG_B, "native", (600, 800, 900), (1200, 1200, 1200)),
        (AG_B, "ring", (600, 800, 900), (0, 0, 0)),
    ],
)
def test_bytes(kind: Kind, algorithm: str, sent: tuple[int, ...], buffer: tuple[int, ...]) -> None:
    collectives = Collectives(algorithm)
    assert tuple(collectives.sent(kind, 1200, world) for world in (2, 3, 4)) == sent
    assert tuple(collectives.buffer(kind, 1200, world) for world in (2, 3, 4)) == buffer


def test_nccl_copies_nothing_and_sends_no_more_than_necessary() -> None:
    nccl = Collectives.default("nccl")
    assert [nccl.sent(kind, 1200, 3) for kind in (AR, RS, AG_F, AG_B)] == [1600, 800, 800, 800]
    assert [nccl.buffer(kind, 1200, 3) for kind in (AR, RS, AG_F, AG_B)] == [0, 0, 0, 0]


@pytest.mark.parametrize("backend", ALGORITHMS)
def test_one_rank_sends_and_holds_nothing(backend: str) -> None:
    for name in ALGORITHMS[backend]:
        collectives = Collectives(name, backend)
        for kind in (AR, RS, AG_F):
            assert (collectives.sent(kind, 1200, 1), collectives.buffer(kind, 1200, 1)) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("direct",), "algorithm must be native or ring on gloo, got 'direct'"),
        (("ring", "nccl"), "algorithm must be native on nccl, got 'ring'"),
        (("native", "mpi"), "backend must be gloo or nccl, got 'mpi'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(wrong: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"collectives: {message}"):
        Collectives(*wrong)


def test_a_profile_keeps_them_and_a_plan_is_another_with_others() -> None:
    profile = replace(chain(10), collectives=Collectives("native"))
    assert Profile.from_json(profile.to_json()) == profile
    assert profile != chain(10) and hash(profile) != hash(chain(10))
    data = json.loads(profile.to_json())
    assert data["collectives"] == asdict(profile.collectives)
    data["collectives"]["algorithm"] = "rng"
    with pytest.raises(ValueError, match="algorithm must be"):
        Profile.from_dict(data)
