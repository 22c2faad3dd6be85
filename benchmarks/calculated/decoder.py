"""Decoders as layers: the GPT and Llama families, with flash attention, in 16 bit.

**Parameters** of a block of width w, with k = w · kv_heads / heads: attention 2 w² + 2 w k, MLP 2 w h (two matrices) or
3 w h (gated), norms 2 w; with biases one for every output and norm. With ``experts``, every expert is such an MLP, and
a router has w · experts.

**Operations** in forward: two per parameter that a token uses and token, and 4 · sequence · w per token in attention.
Flash attention computes the scores again in backward; as all of backward is counted twice the forward, 2.5 times
attention is rounded to 2.

**Bytes** that a block keeps per token (2 bytes an element): inputs and outputs of both norms 4 w, q, k and v w + 2 k,
output of attention w, and in the MLP 2 h (GELU: its input and output) or 4 h (SwiGLU: gate, its SiLU, up, their
product), for each expert that the token goes to. Flash attention (Dao et al. 2022, https://arxiv.org/abs/2205.14135)
keeps no scores. Selective recomputation keeps outputs of matrix products and of attention, and frees the outputs of
norms and activations.

The first and the last layer, embedding and head, share the root unit, as with FSDP. The head keeps logits and
log-probabilities; a third tensor of this size lives for a moment, in forward and in backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.calculated.layers import Layer

_WIDTH = 2  # bytes of an element of an activation


@dataclass(frozen=True)
class Decoder:
    """The shape of a decoder.

    - ``layers``: number of blocks.
    - ``width``: model width.
    - ``heads``, ``kv_heads``: heads of queries, and of keys and values (grouped-query attention).
    - ``hidden``: width of the MLP.
    - ``vocab``: tokens in the vocabulary.
    - ``gated``: whether the MLP has three matrices (SwiGLU) instead of two.
    - ``tied``: whether the head has the embedding's matrix.
    - ``positions``: rows of a learned position embedding.
    - ``biases``: whether matrices and norms have biases.
    - ``experts``, ``active``: experts of each MLP, and how many of them a token goes to.

    Raises ValueError for a number that is not positive, heads that ``kv_heads`` does not divide, and more active
    experts than there are.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: bool = False
    experts: int = 1
    active: int = 1

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "vocab", "experts", "active"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads must divide {self.heads} heads, got {self.kv_heads}")
        if self.active > self.experts:
            raise ValueError(f"a token goes to {self.active} of {self.experts} experts")

    @property
    def _attention(self) -> int:
        return 2 * self.width**2 + 2 * self.width * self._keys

    @property
    def _keys(self) -> int:
        """Width of the keys of a token, and of its values."""
        return self.width * self.kv_heads // self.heads

    @property
    def _mlp(self) -> int:
        return (3 if self.gated else 2) * self.width * self.hidden

    @property
    def block_parameters(self) -> int:
        """Elements of a block."""
        router = self.width * self.experts if self.experts > 1 else 0
        return self._attention + self.experts * self._mlp + router + 2 * self.width + self._block_biases

    @property
    def _block_biases(self) -> int:
        mlp = (2 if self.gated else 1) * self.hidden + self.width
        return 4 * self.width + 2 * self._keys + self.experts * mlp if self.biases else 0

    @property
    def _last_norm(self) -> int:
        return (2 if self.biases else 1) * self.width

    @property
    def parameters(self) -> int:
        """Elements of the whole model."""
        vocabularies = 1 if self.tied else 2
        embeddings = (vocabularies * self.vocab + self.positions) * self.width
        return self.layers * self.block_parameters + embeddings + self._last_norm

    def of_batch(self, sequences: int, sequence: int, loss_bytes: int = 4) -> tuple[Layer, ...]:
        """Return the layers for a batch of ``sequences`` of ``sequence`` tokens.

        - ``loss_bytes``: bytes of a log-probability: 4 under autocast, 2 in pure 16 bit.
        """
        w, tokens = self.width, sequences * sequence
        used = self._attention + self.active * self._mlp
        inside = (4 if self.gated else 2) * self.hidden * self.active
        block = Layer(
            "block",
            self.block_parameters,
            tokens * (2.0 * used + 4.0 * sequence * w),
            kept=_WIDTH * tokens * (6 * w + 2 * self._keys + inside),
            output=_WIDTH * tokens * w,
            # Both norms' outputs; of SwiGLU the SiLU and the product, of GELU its output.
            cheap=_WIDTH * tokens * (2 * w + inside // 2),
        )
        logits = tokens * self.vocab
        return (
            Layer("root", (self.vocab + self.positions) * w, 0.0, output=_WIDTH * tokens * w),
            *(replace(block, unit=f"block.{i}") for i in range(self.layers)),
            Layer(
                "root",
                self._last_norm + (0 if self.tied else self.vocab * w),
                2.0 * logits * w,
                kept=_WIDTH * tokens * w + (_WIDTH + loss_bytes) * logits,
                workspace=loss_bytes * logits,
            ),
        )
