"""Units that are found without a wrap policy: repeated blocks, and layers merged with their neighbours."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers
from torch import nn

from mdcs.model.units import block_roots, describe_units, partition

SMALL = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def language(config: transformers.PretrainedConfig) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config)


def res_net() -> nn.Module:
    return transformers.ResNetForImageClassification(transformers.ResNetConfig(depths=[2, 1, 3, 2]))


def generator() -> nn.Module:
    """A DCGAN's."""
    layers: list[nn.Module] = []
    for wide, narrow in ((100, 512), (512, 256), (256, 128), (128, 64)):
        layers += [nn.ConvTranspose2d(wide, narrow, 4, bias=False), nn.BatchNorm2d(narrow), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, bias=False), nn.Tanh())


class Digits(nn.Module):
    """The net of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)


class Twins(nn.Module):
    """Blocks that are attributes, not members of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (nn.Transformer(8, 2, 1, 1, 8).encoder.layers[0] for _ in range(2))


MODELS = {
    "gpt2": (lambda: language(transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4)), {"GPT2Block": 3}),
    "llama": (lambda: language(transformers.LlamaConfig(**SMALL)), {"LlamaDecoderLayer": 3}),
    "mixtral": (lambda: language(transformers.MixtralConfig(**SMALL, num_key_value_heads=2)), {"MixtralDecoderLayer": 3}),
    "bert": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), {"BertLayer": 3}),
    "vit": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL)), {"ViTLayer": 3}),
    "t5": (
        lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(num_layers=2, d_model=32, d_ff=64)),
        {"T5Block": 4},
    ),
    "resnet": (res_net, {"ResNetConvLayer": 1, "ResNetBottleNeckLayer": 8}),
    "transformer": (
        lambda: nn.Transformer(32, 4, 2, 3, 64, batch_first=True),
        {"TransformerEncoderLayer": 2, "TransformerDecoderLayer": 3},
    ),
    "one block": (lambda: language(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4)), {"GPT2Block": 1}),
    "attributes": (Twins, {"TransformerEncoderLayer": 2}),
    "layers": (lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), {}),
    "generator": (generator, {}),
    "digits": (Digits, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_found(name):
    make, wanted = MODELS[name]
    with torch.device("meta"):
        model = make()
    assert Counter(type(model.get_submodule(root)).__name__ for root in block_roots(model)) == wanted


def test_blocks_are_units_and_layers_outside_of_them_are_merged():
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, vocab_size=5000))
    embeddings = [f"bert.embeddings.{name}" for name in ("position_embeddings", "token_type_embeddings", "LayerNorm")]
    assert [u.name for u in partition(model)] == [
        "bert.embeddings.word_embeddings", "+".join(embeddings),
        *(f"bert.encoder.layer.{i}" for i in range(3)), "bert.pooler.dense+classifier",
    ]  # fmt: skip


def test_a_model_without_blocks_is_divided_by_size_and_norms_go_with_their_layers():
    assert [u.name for u in partition(generator())] == ["0+1", "3+4", "6+7", "9+10+12"]
    assert [u.name for u in partition(Digits())] == ["conv1+conv2", "fc1+fc2"]


def test_tied_weights_and_parameters_of_a_module_around_blocks_stay_alone():
    with torch.device("meta"):
        names = [u.name for u in partition(MODELS["gpt2"][0]())]
    assert names[0] == "transformer.wte+lm_head" and names[-1] == "transformer.ln_f"
    with torch.device("meta"):
        clip = transformers.CLIPModel(transformers.CLIPConfig())
    assert [u.name for u in partition(clip)][0] == "model"  # logit_scale


def test_the_choice_is_said_in_one_line():
    with torch.device("meta"):
        units = partition(MODELS["gpt2"][0]())
    assert describe_units([(u.name, u.modules) for u in units]) == (
        "6 units: transformer.wte+lm_head, transformer.wpe, 3 x GPT2Block, transformer.ln_f"
    )
