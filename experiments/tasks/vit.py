"""The Vision Transformer (Dosovitskiy et al. 2020), for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Images
from experiments.tasks.transformer import Transformer
from mdcs.options import OptionError, option

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Vit(Transformer):
    """transformers' ViT with a classifier. Raises OptionError when `patch` does not divide `image`."""

    image: int = option(224, "pixels along an edge", at_least=1)
    patch: int = option(16, "pixels along a patch's edge; divides image", at_least=1)
    channels: int = option(3, "channels of an image", at_least=1)
    classes: int = option(1000, "classes of images", at_least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image % self.patch:
            raise OptionError("patch", f"must divide image={self.image}, got {self.patch}")

    @property
    def inputs(self) -> Images:
        """Images in their own shape."""
        return Images(self.image, self.channels, self.classes)

    def numbers(self) -> dict[str, Any]:
        """Arguments of ViTConfig."""
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.width, "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width, "image_size": self.image, "patch_size": self.patch,
            "num_channels": self.channels,
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Layers are units; the embeddings of patches and the classifier lie outside of the layers."""
        from transformers import ViTConfig, ViTForImageClassification

        from experiments.tasks.task import Task, cross_entropy

        chosen: dict[str, Any] = {"attn_implementation": "sdpa"}
        config = ViTConfig(
            hidden_dropout_prob=self.dropout, attention_probs_dropout_prob=self.dropout,
            **self.numbers(), **chosen,
        )  # fmt: skip
        config.num_labels = self.classes
        model = self.new(ViTForImageClassification, config)
        self.recompute(model)
        return Task(model, cross_entropy, ("ViTLayer",), self.inputs)
