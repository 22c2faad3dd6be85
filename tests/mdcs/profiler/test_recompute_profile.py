"""Bytes that units free, and what it costs, if they compute their activations again: measured with the shim, to the byte."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mdcs
from mdcs.plan.job import recomputing
from mdcs.profile.recompute import CHOICES, FULL, NONE, SELECTIVE
from mdcs.profiler.merging import merge_profiles
from tests.mdcs.measured import measure_profile, recorded
from tests.mdcs.profiles import few
from tests.mdcs.runtime.ranks import Ranks
from tests.mdcs.runtime.training import optimizer_for, setup


def measured_and_predicted(name: str, shape: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """(measured, predicted) bytes, live and peak of each slot, of several mixes of choices."""
    made = setup(name, **shape)
    units = mdcs.partition(made.model, made.policy)

    def step() -> Tensor:
        return made.loss(made.model, made.batch(0, 0, 0))

    profile = measure_profile(made.model, units, step, optimizer_for("adam", made.model), recompute=True)
    assert profile.recompute and mdcs.Profile.from_json(profile.to_json()).recompute == profile.recompute
    can = {(option.unit, option.choice) for option in profile.recompute}
    out = []
    for first in range(3):
        wanted = itertools.islice(itertools.cycle(CHOICES), first, None)
        choices = [choice if (u, choice) in can else NONE for u, choice in zip(range(len(units)), wanted, strict=False)]
        selective = {u: choice == SELECTIVE for u, choice in enumerate(choices) if choice != NONE}
        found = recorded(made.model, units, step, optimizer_for("adam", made.model), selective)
        slots = recomputing(profile, choices).slots
        out.append((found.live + found.peak, [s.live for s in slots] + [s.peak for s in slots]))
    return out


def peaks_of_transformers(name: str, attention: str) -> list[tuple[int, int]]:
    """(measured, predicted) peaks, of all and of several mixes of choices, of a model of transformers as its config makes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 64}
    more = {} if name.startswith("GPT2") else {"intermediate_size": 128}
    model = kind(kind.config_class(**sizes, **more, attn_implementation=attention, bos_token_id=1, eos_token_id=2))
    units, tokens = mdcs.partition(model), torch.randint(99, (4, 64))

    def step() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    optimizer = optimizer_for("adam", model)
    profile = measure_profile(model, units, step, optimizer, recompute=True)
    assert sum(o.choice == SELECTIVE for o in profile.recompute) == sum(o.choice == FULL for o in profile.recompute) == 3
    first, out = min(o.unit for o in profile.recompute), []
    for chosen in ((FULL,) * 3, (SELECTIVE,) * 3, (SELECTIVE, NONE, FULL), (FULL, SELECTIVE, NONE)):
        choices = [*[NONE] * first, *chosen, *[NONE] * (len(units) - first - 3)]
        selective = {u: choice == SELECTIVE for u, choice in enumerate(choices) if choice != NONE}
        found = recorded(model, units, step, optimizer, selective)
        out.append((max(found.peak), max(slot.peak for slot in recomputing(profile, choices).slots)))
    return out


@pytest.mark.parametrize(("name", "attention"), [
    ("GPT2LMHeadModel", "sdpa"), ("GPT2LMHeadModel", "eager"), ("LlamaForCausalLM", "sdpa"), ("BertForMaskedLM", "sdpa"),
])  # fmt: skip
def test_peaks_of_transformers_with_its_cache_are_predicted_within_a_few_percent(single: Ranks, name, attention):
    for measured, predicted in single.run(peaks_of_transformers, name, attention)[0]:
        assert measured <= predicted <= 1.05 * measured


SHAPES = [
    ("gpt2", {"layers": 3}), ("bert", {"layers": 3}), ("resnet", {"image": 64, "samples": 4}), ("llama", {"layers": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), few(SHAPES))
def test_bytes_of_any_mix_of_choices_are_predicted_from_three_runs(single: Ranks, name, shape):
    for rank in single.run(measured_and_predicted, name, shape):
        for found, predicted in rank:
            if name in ("gpt2", "bert"):
                assert predicted == pytest.approx(found, abs=64)  # scalars
            else:  # a Llama's blocks share the positions, and each is charged
                assert max(found) == pytest.approx(max(predicted), rel=0.005)
                assert all(f <= p + 64 for f, p in zip(found, predicted, strict=True))


class Parts(nn.Module):
    """Blocks of which the model checkpoints one from outside and one from inside, and one changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.by_hand, self.inside = (self.block() for _ in range(3))
        self.counts = Counts()
        own = self.inside.forward
        self.inside.forward = lambda x: checkpoint(own, x, use_reentrant=False)  # type: ignore[method-assign]
        self.head = nn.Linear(6, 2)

    @staticmethod
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.by_hand, self.plain(x), use_reentrant=False)
        out: Tensor = self.head(self.counts(self.inside(x)))
        return out


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        out: Tensor = self.linear(x)
        return out


def options_and_reasons() -> tuple[list[tuple[str, str]], str]:
    torch.manual_seed(0)
    model = Parts()
    units = mdcs.partition(model, mdcs.ByClass(("Sequential", "Counts")))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> Tensor:
        return model(torch.ones(4000, 6)).square().mean()

    optimizer = optimizer_for("adam", model)
    profile = merge_profiles(measure_profile(model, units, step, optimizer, recompute=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not measure_profile(model, units, step, optimizer).recompute
    return [(units[o.unit].name, o.choice) for o in profile.recompute], profile.about["recompute"]


def test_units_that_cannot_keep_their_activations_and_the_profile_says_why(two: Ranks):
    for options, reasons in two.run(options_and_reasons):
        assert options == [("plain", FULL)]  # selectively it would keep the output of its last layer, which it need not
        assert reasons.split("; ") == [
            "by_hand: the model checkpoints it already", "inside: the model checkpoints it already",
            "counts: its forward changes a buffer, so it cannot be computed again with the same result",
            "head: frees nothing",
        ]  # fmt: skip
