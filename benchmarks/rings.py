"""Links of clusters whose collectives run as NCCL's rings: one ring through all devices, node after node.

A ring enters and leaves every node once, so all bytes that a device sends also go through its node's network cards,
which the devices of the node share. The slower of both decides the rate (in NCCL's words the bus bandwidth):

    β = 1 / min(rate within a node, cards · rate of a card · 0.96)    seconds per byte that a device sends

and every step of the ring is a hop, across nodes for one step in ``per_node``:

    α = base + (steps - steps across) · hop within + steps across · hop across

with N - 1 steps, nodes - 1 of them across, and twice as many for an all-reduce. The constants are those by which NCCL
itself chooses (https://github.com/NVIDIA/nccl, src/graph/tuning.cc and topo.h): for each of two protocols, Simple and
LL128, base and hops in microseconds, and the part of the rate that the protocol reaches. Like NCCL the link takes the
protocol that is faster for messages of a given size; LL128 only over NVLink. NCCL counts 12 GB/s for a card of 100
Gbit/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.layers import Layer, Precision, layers_profile
from mdcs.profile.link import Collectives, Kind, Link
from mdcs.profile.schema import Optimizer, Profile

_COLLECTIVES = Collectives.default("nccl")
_CARD_EFFICIENCY = 0.96
_SATURATED = 0.97


class _Protocol(NamedTuple):
    """Seconds of a message's start and of each hop; the part of the bandwidth that it reaches."""

    base: float
    nvlink: float
    pci: float
    network: float
    rate: float


_SIMPLE = _Protocol(8.4e-6, 3.4e-6, 5.7e-6, 9.6e-6, 1.0)
_LL128 = _Protocol(10.0e-6, 1.9e-6, 2.5e-6, 4.0e-6, 0.92)


@dataclass(frozen=True)
class Cluster:
    """``nodes`` of ``per_node`` devices.

    - ``inside_rate``: bytes/s of a ring within a node. ``nvlink``: its devices are connected by NVLink, else by PCIe.
    - ``card_rate``: bytes/s of a network card, by its name. ``cards``: those of a node, which its devices share.
    """

    nodes: int
    per_node: int
    inside_rate: float
    card_rate: float
    cards: int = 1
    nvlink: bool = True

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def _across(self) -> float:
        return self.cards * self.card_rate * _CARD_EFFICIENCY

    def link(self, size: int) -> Link:
        """Return the link, with the protocol that is the faster for messages of ``size`` bytes. It has two levels if
        there are several nodes of several devices.
        """
        two_levels = self.nodes > 1 and self.per_node > 1
        alpha, beta = [], []
        for kind in Kind:
            if kind.in_node and not two_levels:
                continue
            sent = _COLLECTIVES.sent(kind, size, self.world, self.per_node)
            costs = [self._cost(kind, protocol) for protocol in ((_SIMPLE, _LL128) if self.nvlink else (_SIMPLE,))]
            a, b = min(costs, key=lambda cost: cost[0] + cost[1] * sent)
            alpha.append(a)
            beta.append(b)
        block = max(a / b for a, b in zip(alpha, beta, strict=True)) * _SATURATED / (1 - _SATURATED)
        return Link(
            tuple(alpha), tuple(beta), 1, int(block) + 1, gap=(0.0,) * len(alpha),
            per_node=self.per_node if two_levels else 0,
        )

    def _cost(self, kind: Kind, protocol: _Protocol) -> tuple[float, float]:
        """Return α, and β per byte that a device sends."""
        if not kind.in_node:
            times = 2 if kind is Kind.AR else 1
            rate = self.inside_rate if self.nodes == 1 else min(self.inside_rate, self._across)
            return self._ring(protocol, times, self.world - 1, self.nodes - 1, rate)
        inside = self._ring(protocol, 1, self.per_node - 1, 0, self.inside_rate)
        if kind.is_gather:
            return inside
        # Every device of a node has a ring of its own across nodes for its shard. They share the cards.
        rate = min(self.inside_rate, self._across / self.per_node)
        across = self._ring(protocol, 2, self.nodes - 1, self.nodes - 1, rate)
        # bytes sent per byte of the message
        first, second = 1 - 1 / self.per_node, 2 * (1 - 1 / self.nodes) / self.per_node
        return inside[0] + across[0], (first * inside[1] + second * across[1]) / (first + second)

    def _ring(self, protocol: _Protocol, times: int, steps: int, across: int, rate: float) -> tuple[float, float]:
        hop = protocol.nvlink if self.nvlink else protocol.pci
        hops = (steps - across) * hop + across * protocol.network
        return protocol.base + times * hops, 1 / (rate * protocol.rate)


_STATES = {"adam": 2, "momentum": 1}  # tensors of an optimizer's state


def cluster_profile(
    layers: Sequence[Layer], rate: float, cluster: Cluster, *, precision: Precision, optimizer: str = "adam",
    memory_rate: float, interference: float = 0.0,
) -> Profile:  # fmt: skip
    """Return the profile of training a chain of layers on a cluster whose devices reach ``rate`` operations per second.

    - ``optimizer``: adam or momentum. An update takes the time of its memory traffic, at ``memory_rate`` bytes/s.
    - ``interference``: slowdown of compute while a message is in flight.
    """
    states, updated = _STATES[optimizer], precision.master or precision.parameter
    traffic = updated * (2 * states + 2) + precision.gradient + precision.parameter  # read and written per element
    size = precision.parameter * sum(layer.parameters for layer in layers) // len(layers)
    return layers_profile(
        layers, rate, cluster.world, cluster.link(size), precision=precision, interference=interference,
        optimizer=Optimizer(optimizer, states, seconds_per_element=traffic / memory_rate),
    )  # fmt: skip
