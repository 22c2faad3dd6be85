"""ResNets with bottlenecks (He et al. 2015), for images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from experiments.tasks.inputs import Images
from experiments.tasks.library import Library
from mdcs.options import OptionError, option, shown

if TYPE_CHECKING:
    from experiments.tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class ResNet(Library):
    """transformers' ResNet. Raises OptionError for numbers that describe no network."""

    depths: tuple[int, ...] = option((3, 4, 6, 3), "residual blocks per stage", at_least=1)
    hidden_sizes: tuple[int, ...] = option((256, 512, 1024, 2048), "channels per stage", at_least=1)
    stem: int = option(64, "channels of the stem", at_least=1)
    width_divisor: int = option(1, "divides all numbers of channels", at_least=1)
    image: int = option(224, "pixels along an edge", at_least=1)
    channels: int = option(3, "channels of an image", at_least=1)
    classes: int = option(1000, "classes of images", at_least=2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths or len(self.depths) != len(self.hidden_sizes):
            raise OptionError("hidden_sizes", f"must have a value for each of depths={shown(self.depths)}, got "
                              f"{shown(self.hidden_sizes)}")  # fmt: skip
        if self.stem % self.width_divisor:
            raise OptionError("width_divisor", f"must divide stem={self.stem}, got {self.width_divisor}")
        for size in self.hidden_sizes:
            # The inner convolutions of a bottleneck have a quarter of its width.
            if size % (4 * self.width_divisor):
                raise OptionError("hidden_sizes", f"must be multiples of 4 × width_divisor={self.width_divisor}, got {size}")

    @property
    def inputs(self) -> Images:
        """Images in their own shape."""
        return Images(self.image, self.channels, self.classes)

    def numbers(self) -> dict[str, Any]:
        """Arguments of ResNetConfig."""
        return {
            "num_channels": self.channels, "embedding_size": self.stem // self.width_divisor, "depths": list(self.depths),
            "hidden_sizes": [size // self.width_divisor for size in self.hidden_sizes], "layer_type": "bottleneck",
        }  # fmt: skip

    def make(self) -> Task:
        """Make the task. Bottlenecks are units; stem and classifier lie outside of the bottlenecks."""
        from transformers import ResNetConfig, ResNetForImageClassification

        from experiments.tasks.task import Task, cross_entropy

        config = ResNetConfig(**self.numbers())
        config.num_labels = self.classes
        return Task(self.new(ResNetForImageClassification, config), cross_entropy, ("ResNetBottleNeckLayer",), self.inputs)
