"""The link of latency, gap and bytes, with several messages in flight; bytes that every algorithm sends and holds."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, replace

import pytest

from mdcs.profile.link import ALGORITHMS, Collectives, Kind, Link
from mdcs.profile.schema import Profile
from tests.mdcs.profiles import chain

AR, RS, AG_F, AG_B, *_ = Kind


def test_a_kind_is_its_name() -> None:
    assert str(Kind.AG_F) == "AG_F"
    assert {Kind.RS: 1}["RS"] == 1  # type: ignore[index]
    assert pickle.loads(pickle.dumps(Kind.AG_B)) is Kind.AG_B
    assert [k for k in Kind if k.is_gather] == [Kind.AG_F, Kind.AG_B, Kind.AG_F_N, Kind.AG_B_N]


def test_alpha_beta_and_gap_belong_to_a_kind() -> None:
    link = Link((1.0, 2.0, 3.0, 4.0), (0.1, 0.2, 0.3, 0.4), gap=(0.5, 0.6, 0.7, 0.8))
    assert [link.alpha_of(k) for k in link.kinds] == [1.0, 2.0, 3.0, 4.0]
    assert [link.beta_of(k) for k in link.kinds] == [0.1, 0.2, 0.3, 0.4]
    assert [link.gap_of(k) for k in link.kinds] == [0.5, 0.6, 0.7, 0.8]


def test_a_gap_is_between_messages_in_flight_and_in_the_latency_of_one_that_is_alone() -> None:
    link = Link((1.0,) * 4, (0.5,) * 4, depth=2, gap=(0.25,) * 4)
    first = link.end(Kind.RS, 4, start=0.0, previous_end=float("-inf"))
    assert first == 3.0  # 1 s of latency, 2 s of bytes
    assert link.end(Kind.RS, 2, start=0.5, previous_end=first) == 4.25  # the gap, 1 s of bytes
    assert link.end(Kind.RS, 2, start=2.125, previous_end=first) == 4.25  # the gap is over later than the latency
    assert link.end(Kind.RS, 2, start=2.5, previous_end=first) == 4.5  # the latency later than the gap


def test_a_uniform_link_has_one_rate_and_pays_the_latency_of_an_all_reduce_twice() -> None:
    link = Link.uniform(rate_gbit=8, latency_us=50, depth=3, emulated=True)  # 8 Gbit/s are 10^9 bytes per second
    assert link.beta == (1e-9,) * 4
    assert link.alpha == pytest.approx((1e-4, 5e-5, 5e-5, 5e-5))
    assert (link.depth, link.emulated, link.gap) == (3, True, (0.0,) * 4)


def test_a_block_of_a_uniform_link_saturates_it() -> None:
    link = Link.uniform(rate_gbit=8, latency_us=50)
    transfer = link.block * link.beta_of(Kind.RS)
    assert transfer / (link.alpha_of(Kind.RS) + transfer) == pytest.approx(0.97, abs=1e-4)
    assert Link.uniform(rate_gbit=8, latency_us=0).block == 256 * 1024  # never smaller


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link((-1.0, 0, 0, 0), (0.0,) * 4), "alpha, beta and gap must be >= 0"),
        (lambda: Link((0.0,) * 4, (0, 0, 0, -1.0)), "alpha, beta and gap must be >= 0"),
        (lambda: Link((0.0,) * 4, (0.0,) * 4, gap=(0, -1.0, 0, 0)), "alpha, beta and gap must be >= 0"),
        (lambda: Link((0.0,) * 4, (0.0,) * 4, depth=0), "depth must be >= 1, got 0"),
        (lambda: Link((0.0,) * 4, (0.0,) * 4, block=0), "block must be >= 1 byte, got 0"),
        (lambda: Link.uniform(0, 1), "rate_gbit must be > 0, got 0"),
        (lambda: Link.uniform(float("nan"), 1), "rate_gbit must be > 0, got nan"),
        (lambda: Link.uniform(1, -1), "latency_us must be >= 0, got -1"),
    ],
)
def test_impossible_links_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


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
