"""Models are built from numbers alone, have the published sizes, and every parameter of them is trained."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.config import files, targets
from experiments.config.schema import ConfigError
from experiments.tasks.builtin import Digits, StdlibBytes
from experiments.tasks.model import Model
from experiments.tasks.task import Task


@pytest.fixture(autouse=True)
def one_intra_op_thread() -> Iterator[None]:
    """Sums are split over threads: only with one of them are two runs bitwise equal on any machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_named(name: str, **options: Any) -> Model:
    """The model of a file of conf/, with other values for some of its options."""
    given = files.values(files.CONF / "model" / f"{name}.yaml")
    made: Model = targets.make("model", {**given, **options})
    return made


def build(name: str, *, seed: int = 0, **options: Any) -> Task:
    return model_named(name, **options).build(seed=seed)


def on_meta(name: str, **options: Any) -> Task:
    with torch.device("meta"):
        return build(name, **options)


def elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def blocks(task: Task) -> list[nn.Module]:
    return [module for module in task.model.modules() if type(module).__name__ in task.block_classes]


# ---- sizes


REAL = [
    # 12 (12 d² + 13 d) with d = 768; then token and position embeddings and the last norm: 124,439,808.
    ("gpt2-small", 12, 85_054_464, 124_439_808),
    ("gpt2-small-bytes", 12, 85_054_464, 85_054_464 + (256 + 1024 + 2) * 768),
    ("gpt2-medium", 24, 24 * (12 * 1024**2 + 13 * 1024), 24 * (12 * 1024**2 + 13 * 1024) + (50_257 + 1024 + 2) * 1024),
    ("gpt2-xl", 48, 48 * (12 * 1600**2 + 13 * 1600), 48 * (12 * 1600**2 + 13 * 1600) + (50_257 + 1024 + 2) * 1600),
    # Llama 3.2 1B, whose embedding is tied.
    ("llama-1b", 16, 16 * 60_821_504, 1_235_814_400),
    # What torchvision gives for ViT-B/16: 86.57 M. The same blocks as GPT-2 small's.
    ("vit-base", 12, 85_054_464, 86_567_656),
    # The same blocks. 30,522 tokens, 512 positions, 2 segments, a norm; the head: d² + d, a norm, 30,522 biases.
    ("bert-base", 12, 85_054_464, 85_054_464 + (30_522 + 512 + 2 + 2) * 768 + 768 * 768 + 3 * 768 + 30_522),
    # What torchvision and the paper give for these two: 25.56 M and 60.19 M.
    ("resnet50", 16, 25_557_032 - 9_536 - 2_049_000, 25_557_032),
    ("resnet152", 50, 60_192_808 - 9_536 - 2_049_000, 60_192_808),
]


@pytest.mark.parametrize(("name", "count", "in_blocks", "total"), REAL)
def test_real_shapes_have_the_published_number_of_parameters(name: str, count: int, in_blocks: int, total: int) -> None:
    task = on_meta(name)
    assert model_named(name).name == name
    assert len(blocks(task)) == count
    assert sum(map(elements, blocks(task))) == in_blocks
    assert elements(task.model) == total


def test_options_change_the_numbers_they_name() -> None:
    task = on_meta("gpt2-small", layers=3, width=32, heads=2, sequence=16)
    assert [elements(block) for block in blocks(task)] == [12 * 32**2 + 13 * 32] * 3
    assert task.inputs.sequence == 16  # type: ignore[union-attr]
    narrow = on_meta("resnet152", width_divisor=16, depths=(1, 2, 1, 1), classes=7)
    assert len(blocks(narrow)) == 5
    assert narrow.model.classifier[1].weight.shape == (7, 2048 // 16)  # type: ignore[index,union-attr]
    hidden = 5 * 5 + 5
    assert elements(on_meta("mlp", depth=4, width=5, image=2, channels=3, classes=2).model) == (
        (12 * 5 + 5) + 2 * hidden + (5 * 2 + 2)
    )


# ---- what training needs


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2-tiny", {}), ("gpt2-tiny", {"tie": False}), ("bert-tiny", {}), ("bert-tiny", {"tie": False}), ("llama-tiny", {}),
     ("llama-tiny", {"tie": True, "checkpointing": True}), ("vit-tiny", {}), ("bert-tiny-pairs", {}), ("resnet-tiny", {}),
     ("mlp", {"depth": 3, "width": 16})],
)  # fmt: skip
def test_every_parameter_gets_a_gradient(name: str, options: dict[str, Any]) -> None:
    task = build(name, **options)
    loss = task.loss(task.model, task.example_batch(4))
    assert loss.shape == () and torch.isfinite(loss)
    loss.backward()
    without = [key for key, p in task.model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_byte_zero_is_a_byte_and_not_padding() -> None:
    embedding = build("bert-tiny", tie=False).model.get_submodule("bert.embeddings.word_embeddings")
    assert isinstance(embedding, nn.Embedding)
    embedding(torch.tensor([0, 1])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:3].sum(dim=1).tolist() == [64.0, 64.0, 0.0]


def test_weights_follow_the_seed_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    first, other = build("gpt2-tiny", seed=1), build("gpt2-tiny", seed=2)
    assert torch.rand(3).equal(expected)
    torch.manual_seed(99)
    again = build("gpt2-tiny", seed=1)
    assert all(p.equal(q) for p, q in zip(first.model.parameters(), again.model.parameters(), strict=True))
    assert not all(p.equal(q) for p, q in zip(first.model.parameters(), other.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "embedding", "head"),
    [("gpt2-tiny", "transformer.wte", "lm_head"), ("bert-tiny", "bert.embeddings.word_embeddings", "cls.predictions.decoder")],
)
def test_tying_is_real(name: str, embedding: str, head: str) -> None:
    tied = build(name).model
    assert tied.get_submodule(embedding).weight is tied.get_submodule(head).weight
    untied = build(name, tie=False).model
    assert untied.get_submodule(embedding).weight is not untied.get_submodule(head).weight
    weight = untied.get_submodule(head).weight
    assert isinstance(weight, Tensor)
    assert elements(untied) - elements(tied) == weight.numel()


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny"])
def test_checkpointing_changes_no_gradient(name: str) -> None:
    def gradients(checkpointing: bool) -> list[Tensor | None]:
        task = build(name, seed=5, checkpointing=checkpointing)
        task.loss(task.model, task.example_batch(2)).backward()
        return [parameter.grad for parameter in task.model.parameters()]

    def saved(checkpointing: bool) -> int:
        task = build(name, seed=5, checkpointing=checkpointing)
        sizes: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            task.loss(task.model, task.example_batch(2))
        return sum(sizes)

    for plain, recomputed in zip(gradients(False), gradients(True), strict=True):
        assert plain is not None and recomputed is not None and plain.equal(recomputed)
    assert saved(True) < saved(False) / 2


def test_dropout_is_off_unless_asked_for() -> None:
    def two_losses(dropout: float) -> tuple[float, float]:
        task = build("gpt2-tiny", dropout=dropout)
        batch = task.example_batch(2)
        return task.loss(task.model, batch).item(), task.loss(task.model, batch).item()

    first, second = two_losses(0.0)
    assert first == second
    first, second = two_losses(0.3)
    assert first != second


# ---- losses


@pytest.mark.parametrize("name", ["gpt2-tiny", "bert-tiny", "resnet-tiny"])
def test_a_float64_model_has_a_float64_loss_and_bfloat16_a_float32_one(name: str) -> None:
    task = build(name)

    def loss_in(dtype: torch.dtype) -> Tensor:
        batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in task.example_batch(2).items()}
        return task.loss(task.model.to(dtype), batch)

    loss = loss_in(torch.float64)
    assert loss.dtype == torch.float64
    assert loss.item() != loss.float().item(), "a loss that float32 can hold was rounded on the way"
    assert loss_in(torch.bfloat16).dtype == torch.float32


def test_causal_attention_sees_no_future() -> None:
    task = build("gpt2-tiny")
    batch = task.example_batch(1)
    changed = batch["input_ids"].clone()
    changed[0, 40:] = (changed[0, 40:] + 1) % 256
    before = task.model(input_ids=batch["input_ids"]).logits
    after = task.model(input_ids=changed).logits
    assert before[0, :40].equal(after[0, :40])
    assert not before[0, 40:].equal(after[0, 40:])


@pytest.mark.parametrize(
    ("name", "options", "source", "to"),
    [
        ("gpt2-tiny", {"sequence": 32}, "stdlib_bytes", 4.3),
        ("bert-tiny", {"sequence": 32}, "stdlib_bytes", 4.6),
        ("resnet-tiny", {}, "digits", 1.6),
        ("mlp", {"depth": 2, "width": 64}, "digits", 1.0),
        ("llama-tiny", {"sequence": 32}, "stdlib_bytes", 4.3),
        ("vit-tiny", {"image": 16}, "digits", 2.2),
    ],
)
def test_loss_falls_on_real_data(name: str, options: dict[str, Any], source: str, to: float) -> None:
    task = build(name, seed=0, **options)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=3e-3)
    losses = []
    chosen = Digits(batch_size=32) if source == "digits" else StdlibBytes(batch_size=32)
    stream = chosen.batches(task.inputs, rank=0, world=1)
    for batch, _ in zip(stream, range(30), strict=False):
        optimizer.zero_grad()
        loss = task.loss(task.model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    start = 5.2 if source == "stdlib_bytes" else 2.0  # about ln 256 and ln 10: nothing is known yet
    assert losses[0] > start
    assert sum(losses[-5:]) / 5 < to


# ---- refusals


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gpt2-tiny", {"heads": 5}, "heads: must divide width=64, got 5"),
        ("gpt2-tiny", {"layers": 0}, "layers: must be >= 1, got 0"),
        ("bert-tiny", {"dropout": 1.0}, "dropout: must be < 1, got 1"),
        ("bert-tiny", {"sequence": 0}, "sequence: must be >= 1, got 0"),
        ("resnet50", {"depths": (1, 2)}, "depths: must have 4 values, got [1,2]"),
        ("resnet50", {"width_divisor": 3}, "width_divisor: must divide 64, got 3"),
        ("mlp", {"classes": 1}, "classes: must be >= 2, got 1"),
        ("mlp", {"heads": 3}, "heads: no such key of Mlp; its keys: name, wrap, wrap_min_params, frozen, "
                              "image, channels, classes, depth, width"),
    ],
)  # fmt: skip
def test_a_value_that_gives_no_model_is_refused_with_its_name(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_named(name, **options)
    assert str(caught.value) == f"model.{words}"


def test_weights_are_those_of_a_folder(tmp_path: Path) -> None:
    trained = build("gpt2-tiny", seed=7).model
    trained.save_pretrained(tmp_path)  # type: ignore[operator]
    task = build("gpt2-tiny", seed=1, weights=str(tmp_path))
    assert task.model.training
    assert all(p.equal(q) for p, q in zip(task.model.parameters(), trained.parameters(), strict=True))
    with pytest.raises(ConfigError) as caught:
        model_named("gpt2-tiny", layers=3, weights=str(tmp_path))
    assert str(caught.value) == f"model.weights: {tmp_path} has num_hidden_layers=2, the model 3"


def test_weights_with_a_head_of_their_own_are_not_for_a_tied_one(tmp_path: Path) -> None:
    build("llama-tiny", tie=False).model.config.save_pretrained(tmp_path)  # type: ignore[operator,union-attr]
    with pytest.raises(ConfigError, match="has tie_word_embeddings=false, the model true"):
        model_named("llama-tiny", tie=True, weights=str(tmp_path))


@pytest.mark.parametrize("name", sorted({*files.groups()["model"]} - {"own", *(row[0] for row in REAL)}))  # test_own.py
def test_every_file_builds_and_names_classes_that_exist(name: str) -> None:
    assert model_named(name).name == name
    assert blocks(on_meta(name))
