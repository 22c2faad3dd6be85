"""Analytic profiles: a transformer on a device and a hierarchical network, calculated instead of measured.

**Computing.** A block of width w on T = batch · sequence tokens takes T · (24 w² + 4 · sequence · w) floating-point
operations in forward (its matrices, then attention). Backward takes twice as many, and the forward again with
checkpointing. The output layer takes 2 · T · w · vocab. Seconds are operations / (peak rate · efficiency).

**Activations** in 16 bit (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198): T · (34 w + 5 · heads · sequence)
bytes per block. With checkpointing 2 · T · w bytes are kept per block, and the rest lives only while its block runs.
Logits: 6 · T · vocab.

**Recomputation.** Without checkpointing every block has two options. ``full`` is what checkpointing does. ``selective``
frees the 5 · heads · sequence bytes inside attention, and computes attention again (ibid.).

**Network.** n nodes of g devices. A message of S bytes goes around a ring within each node, then around one ring across
nodes per device:

- all-gather and reduce-scatter over the world of n · g: (g-1) α_intra + (n-1) α_inter
  + S (g-1)/g · β_intra + S (n-1)/(n g) · β_inter. An all-reduce takes both.
- ``group=node``: parameters are sharded over the g devices of a node, and every node has all of them. An all-gather
  stays within the node: (g-1) α_intra + S (g-1)/g · β_intra. A reduction is followed by an all-reduce of each shard
  across nodes, which adds 2 (n-1) α_inter + 2 · S (n-1)/(n g) · β_inter (hybrid sharding; Zhao et al. 2023,
  https://arxiv.org/abs/2304.11277). The all-reduce is a reduce-scatter, the update and an all-gather, so the nodes
  share the optimizer state.

In the profile of ``group=node`` the world is g, and β is per byte that a rank sends within its node.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mdcs.profile.link import Collectives, Kind, Link
from mdcs.profile.recompute import FULL, SELECTIVE, RecomputeOption, RecomputeUse
from mdcs.profile.schema import Optimizer, Profile, Slot, Unit

COLLECTIVES = Collectives.default("nccl")

_SATURATED = 0.97
_STATE_BYTES = 12  # bytes per parameter: Adam with fp32 master weights
_WIDTH = 2  # bytes of a parameter and of a gradient
_UPDATE_TRAFFIC = 2 * _STATE_BYTES + 2 * _WIDTH  # bytes of memory read and written per parameter


@dataclass(frozen=True)
class Transformer:
    """A decoder with tied embeddings.

    - ``layers``: number of blocks.
    - ``width``: model width.
    - ``heads``: attention heads.
    - ``sequence``: tokens per sequence.
    - ``vocab``: tokens in the vocabulary.
    - ``batch``: sequences per device and micro-step.
    - ``checkpointing``: whether backward recomputes each block (activation checkpointing). Else that is an option.

    Raises ValueError for a number that is not positive.
    """

    layers: int
    width: int
    heads: int
    sequence: int
    vocab: int
    batch: int = 1
    checkpointing: bool = True

    def __post_init__(self) -> None:
        _positive(self)

    @property
    def block_parameters(self) -> int:
        """Elements of a block: 12 width² in matrices (attention 4, MLP 8), 13 width in biases and norms."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def embedding_parameters(self) -> int:
        """Elements of the token and position embeddings and the last norm: (vocab + sequence + 2) · width."""
        return (self.vocab + self.sequence + 2) * self.width

    @property
    def tokens(self) -> int:
        """Tokens per device and micro-step."""
        return self.batch * self.sequence

    @property
    def block_activations(self) -> int:
        """Bytes of a block's activations while it runs."""
        return self.tokens * (34 * self.width + 5 * self.heads * self.sequence)


@dataclass(frozen=True)
class Device:
    """A compute device.

    - ``peak_flops``: peak rate in FLOP/s.
    - ``efficiency``: fraction of the peak rate that is reached.
    - ``memory_rate``: memory bandwidth in bytes/s.

    Raises ValueError for a number that is not positive, or an efficiency above 1.
    """

    peak_flops: float
    efficiency: float
    memory_rate: float

    def __post_init__(self) -> None:
        _positive(self)
        if self.efficiency > 1:
            raise ValueError(f"efficiency must be <= 1, got {self.efficiency}")

    def seconds(self, operations: float) -> float:
        """Return the seconds that this many floating-point operations take."""
        return operations / (self.peak_flops * self.efficiency)


@dataclass(frozen=True)
class Network:
    """``nodes`` of ``per_node`` devices, with the latency and bandwidth of both levels.

    - ``intra_alpha``, ``inter_alpha``: seconds per hop.
    - ``intra_beta``, ``inter_beta``: seconds per byte of one device.

    Raises ValueError for a number that is not positive.
    """

    nodes: int
    per_node: int
    intra_alpha: float
    intra_beta: float
    inter_alpha: float
    inter_beta: float

    def __post_init__(self) -> None:
        _positive(self)

    @property
    def world(self) -> int:
        """Number of devices in all nodes."""
        return self.nodes * self.per_node

    def link(self, group: str, depth: int = 1) -> Link:
        """Return the link of collectives over a sharding group, by the formulas above.

        - ``group``: ``node`` or ``world``.
        - ``depth``: messages in flight.

        Raises ValueError as :meth:`group_size` does.
        """
        n, g, size = self.nodes, self.per_node, self.group_size(group)
        ring = (g - 1) * self.intra_alpha, (g - 1) / g * self.intra_beta  # within a node; β per byte of payload
        rings = (n - 1) * self.inter_alpha, (n - 1) / (n * g) * self.inter_beta  # across nodes
        gather = scatter = _sum(ring, rings)
        if group == "node":
            gather, scatter = ring, _sum(ring, rings, rings)
        by_kind = {Kind.AR: _sum(gather, scatter), Kind.RS: scatter, Kind.AG_F: gather, Kind.AG_B: gather}
        alpha = tuple(alpha for alpha, _ in by_kind.values())
        # β above is per byte of payload; β of a Link is per byte that one rank sends.
        beta = tuple(beta * size / max(1, COLLECTIVES.sent(kind, size, size)) for kind, (_, beta) in by_kind.items())
        block = max(alpha / beta for alpha, beta in by_kind.values()) * _SATURATED / (1 - _SATURATED)
        return Link(alpha, beta, depth, int(block) + 1)

    def group_size(self, group: str) -> int:
        """Return the number of devices over which parameters are sharded.

        Raises ValueError for an unknown group, and for a group of one device.
        """
        if group not in ("node", "world"):
            raise ValueError(f"sharding group must be node or world, got {group!r}")
        size = self.per_node if group == "node" else self.world
        if size < 2:
            raise ValueError(f"a sharding group needs at least 2 devices, a {group} has {size}")
        return size


def analytic_profile(
    model: Transformer, device: Device, network: Network, *, group: str = "world", depth: int = 1
) -> Profile:
    """Return the profile of training ``model`` in 16 bit with Adam and fp32 master weights, sharded over ``group``.

    The units are the tied embedding, which the first and the last slot use, and the blocks. Seconds and activation
    bytes follow the formulas above, without contention. Raises ValueError for a group of one device.
    """
    last = model.layers + 1
    units = (
        Unit("embedding", (model.embedding_parameters,), True, (0, last), (0, last), "bfloat16"),
        *(
            Unit(f"block.{i}", (model.block_parameters,), True, (i + 1, i + 1), (last - 1 - i,) * 2, "bfloat16")
            for i in range(model.layers)
        ),
    )  # fmt: skip
    sharers = network.world // network.group_size(group)
    return Profile(
        units=units,
        slots=_slots(model, device),
        world=network.group_size(group),
        link=network.link(group, depth),
        optimizer=Optimizer(
            "adam", _STATE_BYTES / _WIDTH / sharers, seconds_per_element=_UPDATE_TRAFFIC / device.memory_rate / sharers
        ),
        collectives=COLLECTIVES,
        copy_seconds_per_byte=2 / device.memory_rate,
        recompute=() if model.checkpointing else _options(model, device),
        about={
            "model": str(asdict(model)),
            "device": str(asdict(device)),
            "network": str(asdict(network)),
            "group": group,
        },
    )


def _options(model: Transformer, device: Device) -> tuple[RecomputeOption, ...]:
    """Return two options per block. The peak of its backward is the same with each."""
    output, scores = 2 * model.tokens * model.width, 5 * model.tokens * model.heads * model.sequence
    freed = {FULL: model.block_activations - output, SELECTIVE: scores}
    seconds = {
        FULL: _forward_s(model, device),
        SELECTIVE: device.seconds(4 * model.tokens * model.sequence * model.width),
    }
    return tuple(
        RecomputeOption(i + 1, choice, (RecomputeUse(i + 1, model.layers - i, size, seconds[choice], size + output),))
        for i in range(model.layers)
        for choice, size in freed.items()
    )


def _forward_s(model: Transformer, device: Device) -> float:
    return device.seconds(model.tokens * (24 * model.width**2 + 4 * model.sequence * model.width))


def _slots(model: Transformer, device: Device) -> tuple[Slot, ...]:
    tokens, width = model.tokens, model.width
    forward = _forward_s(model, device)
    backward = (3 if model.checkpointing else 2) * forward
    head = device.seconds(2 * tokens * width * model.vocab)
    inside = model.block_activations
    output = 2 * tokens * width  # bytes of the output of the embedding, or of a block
    kept = output if model.checkpointing else inside
    logits = 6 * tokens * model.vocab
    blocks = [(i + 1, output + i * kept) for i in range(model.layers)]  # unit, bytes before its forward
    saved = output + model.layers * kept
    return (
        Slot(0, "F", 0.0, 0, output),
        *(Slot(unit, "F", forward, live, live + inside) for unit, live in blocks),
        Slot(0, "F", head, saved, saved + logits),
        Slot(0, "B", 2 * head, saved + logits, saved + 2 * logits),
        # The backward of a block also holds the gradients of its output and its input.
        *(
            Slot(unit, "B", backward, live + kept + output, live + inside + 2 * output)
            for unit, live in reversed(blocks)
        ),
        Slot(0, "B", 0.0, 2 * output, 2 * output),
    )  # fmt: skip


def _sum(*costs: tuple[float, float]) -> tuple[float, float]:
    return sum(alpha for alpha, _ in costs), sum(beta for _, beta in costs)


def _positive(values: Transformer | Device | Network) -> None:
    for name, value in asdict(values).items():
        if not isinstance(value, bool) and not value > 0:
            raise ValueError(f"{name} must be > 0, got {value}")
