"""Runs that others have published, as ``published.yaml`` has them, and their prediction.

A group of runs shares model, devices and loop. The first run of a group, the smallest, says how fast the device
computes: the rate of operations with which the predicted step equals the published one. The other runs are predicted
with this rate. The links come from what the publication says of the network and from constants of NCCL
(:mod:`benchmarks.rings`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.layers import Decoder, Layer, Precision, inception_v3, resnet, vgg16
from benchmarks.rings import Cluster, cluster_profile
from mdcs.plan.job import Job
from mdcs.plan.plan import Plan
from mdcs.planner.pipeline import make_plan
from mdcs.planner.schedulers import Wfbp
from mdcs.planner.strategies import Uniform
from mdcs.profile.recompute import FULL, NONE, SELECTIVE
from mdcs.profile.schema import Profile
from mdcs.sizes import GIB, MIB

PUBLISHED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))

TCP_RATE = 13.7e9 / 8
"""Bytes/s of one TCP stream, as iperf measured it between two virtual machines
(https://github.com/bytedance/byteps/issues/29)."""
TCP_EFFICIENCY = 0.949  # payload of Ethernet frames of 1,500 bytes on the wire
INTERFERENCE = 0.189
"""Slowdown of compute while a collective runs: the average of https://arxiv.org/abs/2507.03114."""
CONTEXT_BYTES = GIB // 2  # a CUDA context with the kernels of torch
NCCL_BYTES = 32 * 2 * (4 * MIB + 2 * MIB + MIB // 2)
"""Buffers of a communicator: 32 channels, two neighbours, a buffer for each protocol. The Simple protocol's is the
documented 4 MiB of NCCL_BUFFSIZE."""

PRECISIONS = {
    "fp32": Precision(4, 4),
    "bf16": Precision(2, 2, 4),  # fp32 masters; gradients are reduced in bf16
    "bf16-fp32": Precision(2, 4, 4),  # the same, reduced in fp32
    "float8": Precision(1, 4, 4),  # parameters are gathered in 8 bit
}


@dataclass(frozen=True)
class Device:
    """A device and the links within its node.

    - ``memory_gib``: memory. ``memory_gbyte``: its rate, 10⁹ bytes/s.
    - ``inside_gbyte``: rate of a ring within a node, 10⁹ bytes/s. ``nvlink``: else PCIe.
    """

    memory_gib: float
    memory_gbyte: float
    inside_gbyte: float
    nvlink: bool = True


@dataclass(frozen=True)
class Case:
    """One published run.

    - ``devices``, ``per_node``, ``cards``, ``card_gbit``, ``tcp``: the cluster. ``cards`` of each node are shared.
    - ``batch``: samples per device and micro-step. ``sequence``: tokens of a sample.
    - ``strategy``: the strategy of all units that stands for the loop.
    - ``fused_loss``: whether the loss keeps no log-probabilities.
    - ``recompute``: none, full, selective, or full for a number of blocks, or for ``half`` of them.
    - ``seconds``: published seconds per step. None: only ``gib`` or ``fits`` are published.
    - ``gib``: published memory that the allocator reserves. ``fits``: whether the run fits on the device.
    - ``note``: what else the run has. ``why``: why its prediction is far off.
    - ``interference``: slowdown of compute while a message is in flight.
    """

    model: str
    device: Device
    devices: int
    batch: int
    strategy: str
    precision: str
    optimizer: str = "adam"
    per_node: int = 8
    cards: int = 8
    card_gbit: float = 200.0
    tcp: bool = False
    sequence: int = 0
    micro_steps: int = 1
    fused_loss: bool = False
    recompute: str | int = NONE
    seconds: float | None = None
    gib: float | None = None
    fits: bool = True
    note: str = ""
    why: str = ""
    interference: float = INTERFERENCE

    @property
    def mark(self) -> float:
        """Wanted error of a step: 20 % over TCP, 10 % over other links."""
        return 0.2 if self.tcp else 0.1

    def layers(self) -> tuple[Layer, ...]:
        if self.model in CONVOLUTIONAL:
            return CONVOLUTIONAL[self.model](self.batch)
        loss_bytes = 0 if self.fused_loss else 2 if self.precision == "bf16" else 4
        every_second = self.recompute == SELECTIVE  # all such runs are torchtitan's
        return DECODERS[self.model].of_batch(self.batch, self.sequence, loss_bytes, every_second)

    def cluster(self) -> Cluster:
        """Return the cluster. Several devices fill one node before the next."""
        per_node = min(self.per_node, self.devices)
        card = self.card_gbit * 1e9 / 8
        if self.tcp:
            card = min(card * TCP_EFFICIENCY, TCP_RATE)
        rate = self.device.inside_gbyte * 1e9
        return Cluster(self.devices // per_node, per_node, rate, card, self.cards, self.device.nvlink)

    def profile(self, rate: float) -> Profile:
        """Return the profile, if the device reaches ``rate`` operations per second."""
        return cluster_profile(
            self.layers(), rate, self.cluster(), precision=PRECISIONS[self.precision], optimizer=self.optimizer,
            memory_rate=self.device.memory_gbyte * 1e9, interference=self.interference,
        )  # fmt: skip

    def plan(self, rate: float) -> Plan:
        """Return the plan of the published loop: messages as ready, gathers one unit ahead, updates at the end."""
        profile = self.profile(rate)
        job = Job(profile, cross_iteration=False, recompute=self._choices(profile))
        return make_plan(job, Uniform(self.strategy), Wfbp())

    def _choices(self, profile: Profile) -> tuple[str, ...]:
        blocks = [u for u, unit in enumerate(profile.units) if unit.name.startswith("block")]
        some = {"none": 0, "half": len(blocks) // 2}
        chosen = self.recompute if isinstance(self.recompute, int) else some.get(self.recompute, len(blocks))
        choice = SELECTIVE if self.recompute == SELECTIVE else FULL
        return tuple(choice if u in blocks[:chosen] else NONE for u in range(len(profile.units)))


CONVOLUTIONAL: dict[str, Callable[[int], tuple[Layer, ...]]] = {
    "VGG-16": vgg16, "Inception V3": inception_v3,
    **{f"ResNet-{depth}": partial(resnet, depth) for depth in (50, 101, 152)},
}  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """A published run and its prediction: seconds per step, seconds of computing if no message ever disturbed it
    (``alone_s``), the most bytes that are allocated at once, and bytes that the allocator reserves.
    """

    case: Case
    step_s: float
    alone_s: float
    peak: int
    reserved: int

    @property
    def error(self) -> float:
        assert self.case.seconds is not None
        return self.step_s / self.case.seconds - 1

    @property
    def needed(self) -> int:
        """Bytes of the device that the run needs: what is cached but not allocated is given back in time."""
        return self.peak + CONTEXT_BYTES + NCCL_BYTES

    @property
    def fits(self) -> bool:
        return self.needed <= self.case.device.memory_gib * GIB


@cache
def predict(case: Case, rate: float) -> Predicted:
    """Predict a run on devices that reach ``rate`` operations per second."""
    plan = case.plan(rate)
    told, precision, k = plan.prediction, PRECISIONS[case.precision], case.micro_steps
    assert told is not None
    # The caching allocator has a pool per stream. FSDP gathers, reduces and computes on different streams, so what one
    # of them has freed is not free for the others: each category counts at its own peak. Gradient shards are as wide as
    # the masters, and a shard of masters is copied into 16 bit before it is gathered.
    memory = {name: size for name, size in told.memory.items() if name not in ("total", "update_scratch")}
    widest = max(precision.gradient, precision.master)
    memory["gradient_shards"] = memory["gradient_shards"] * widest // precision.gradient
    if precision.master:
        largest = max(unit.numel for unit in plan.profile.units)
        memory["staging"] += largest // plan.profile.world * precision.parameter
    # FSDP reduces in every micro-step, so a step of several is as long as several steps, with one update.
    step_s = k * told.step_s - (k - 1) * sum(plan.seconds.update)
    return Predicted(case, step_s, k * sum(plan.period.seconds), told.peak_bytes, sum(memory.values()))


def calibrated(case: Case) -> float:
    """Return the rate of operations with which the predicted step of this run is the published one. Without a published
    step any rate is as good: memory does not depend on it. Raises ValueError if no rate is found.
    """
    operations = predict(case, 1.0).alone_s
    if case.seconds is None:
        return operations
    rate = operations / case.seconds
    for _ in range(20):
        told = predict(case, rate)
        if abs(told.step_s - case.seconds) < 1e-4 * case.seconds:
            return rate
        rate = operations / max(0.1 * case.seconds, case.seconds - (told.step_s - told.alone_s))
    raise ValueError(f"{case.model} on {case.devices} devices: no rate predicts a step of {case.seconds:g} s")


@dataclass(frozen=True)
class Group:
    """Runs of one publication that share how fast the device computes. The first is the smallest.

    - ``network``: what is known of the network, in words.
    - ``fits_link``: the network is not known, so the run after the first says how fast it is. This run is not judged
      either.
    """

    title: str
    url: str
    network: str
    runs: tuple[Case, ...]
    fits_link: bool = False

    def predictions(self) -> list[Predicted]:
        """Predict all runs with the rate of the smallest."""
        runs = self.changed(card_gbit=self._card_gbit()).runs if self.fits_link else self.runs
        rate = calibrated(runs[0])
        return [predict(case, rate) for case in runs]

    def changed(self, **fields: Any) -> Group:
        """Return the same runs with other values of some fields."""
        return replace(self, runs=tuple(replace(case, **fields) for case in self.runs))

    @property
    def judged(self) -> int:
        """Index of the first run that is judged."""
        return 2 if self.fits_link else 1

    def _card_gbit(self) -> float:
        """Return the rate of a card with which the second run takes as long as published."""
        low, high = 10.0, 400.0
        for _ in range(10):
            middle = (low * high) ** 0.5
            first, second = self.changed(card_gbit=middle).runs[:2]
            told = predict(second, calibrated(first))
            if second.seconds is not None and told.step_s > second.seconds:
                low = middle
            else:
                high = middle
        return (low * high) ** 0.5


def _case(row: dict[str, Any]) -> Case:
    """Return a run, whose speed is published in one of three units."""
    seconds, samples = row.get("seconds"), row["batch"] * row.get("micro_steps", 1)
    if "tokens" in row:  # per second and device
        seconds = samples * row["sequence"] / row["tokens"]
    elif "images" in row:  # per second, all devices
        seconds = samples * row["devices"] / row["images"]
    known = {field.name: row[field.name] for field in fields(Case) if field.name in row}
    return Case(**known | {"device": DEVICES[row["device"]], "seconds": seconds})


def read() -> list[Group]:
    groups = []
    for table in PUBLISHED["tables"]:
        for group in table["groups"]:
            shared = table["all"] | {key: value for key, value in group.items() if key != "runs"}
            runs = tuple(_case(shared | run) for run in group["runs"])
            groups.append(Group(table["title"], table["url"], table["network"], runs, table.get("fits_link", False)))
    return groups


DEVICES = {name: Device(**fields) for name, fields in PUBLISHED["devices"].items()}
DECODERS = {name: Decoder(**shape) for name, shape in PUBLISHED["decoders"].items()}
