"""Batches follow from (seed, step); ranks split them without overlap and add up to one bigger process."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.tasks.builtin import Digits, StdlibBytes, Synthetic, text
from experiments.tasks.data import IGNORED, Data, Images, Inputs, Pairs, Tokens
from experiments.tasks.hub import CLS, PAD, SEP, SHIPPED, Nli, Text

TEXT = Tokens(sequence=32)
MASKED = Tokens(sequence=40, masked=True)
PICTURES = Images(size=16, channels=3, classes=10)
VECTORS = Images(size=8, channels=1, classes=10, flat=True)
SENTENCES = Pairs(sequence=96, vocabulary=259, classes=3)
CAP = 40_000  # bytes of text: 1,249 windows of 32

every_source = pytest.mark.parametrize(
    ("name", "inputs"),
    [*(("stdlib_bytes", inputs) for inputs in (TEXT, MASKED)), *(("digits", inputs) for inputs in (PICTURES, VECTORS)),
     *(("synthetic", inputs) for inputs in (TEXT, MASKED, PICTURES, VECTORS, SENTENCES)), ("nli", SENTENCES)],
)  # fmt: skip


SOURCES: dict[str, type[Data]] = {"stdlib_bytes": StdlibBytes, "digits": Digits, "synthetic": Synthetic, "nli": Nli}


def batches(name, inputs, *, rank=0, world=1, batch_size=4, seed=0, max_bytes=0, **options) -> Iterator[dict[str, Tensor]]:
    own = {"max_bytes": max_bytes} if max_bytes else {}
    return SOURCES[name](batch_size=batch_size, seed=seed, **own).batches(inputs, rank=rank, world=world, **options)


def take(count: int, name: str, inputs: Inputs, **options: int) -> list[dict[str, Tensor]]:
    stream = batches(name, inputs, max_bytes=CAP if name == "stdlib_bytes" else 0, **options)
    return list(itertools.islice(stream, count))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)


# ---- what every source promises


@every_source
def test_shapes_and_dtypes_are_those_the_inputs_name(name: str, inputs: Inputs) -> None:
    (batch,) = take(1, name, inputs, batch_size=5)
    found = {key: (value.dtype, tuple(value.shape)) for key, value in batch.items()}
    if isinstance(inputs, Tokens):
        shape = (torch.int64, (5, inputs.sequence))
        assert found == {"input_ids": shape, "labels": shape}
        assert int(batch["input_ids"].max()) <= inputs.vocabulary
    elif isinstance(inputs, Pairs):
        shape = (torch.int64, (5, inputs.sequence))
        names = ("input_ids", "token_type_ids", "attention_mask")
        assert found == {**dict.fromkeys(names, shape), "labels": (torch.int64, (5,))}
        assert int(batch["input_ids"].max()) < inputs.vocabulary and int(batch["labels"].max()) < inputs.classes
    elif inputs.flat:
        assert found == {"inputs": (torch.float32, (5, 64)), "labels": (torch.int64, (5,))}
    else:
        assert found == {"pixel_values": (torch.float32, (5, 3, 16, 16)), "labels": (torch.int64, (5,))}


@every_source
def test_the_same_seed_gives_the_same_batches_and_another_seed_others(name: str, inputs: Inputs) -> None:
    first, again = take(3, name, inputs, seed=7), take(3, name, inputs, seed=7)
    assert all(map(same, first, again))
    assert not any(map(same, first, take(3, name, inputs, seed=8)))


@every_source
def test_ranks_together_are_one_process_with_the_whole_batch(name: str, inputs: Inputs) -> None:
    """The premise of comparing N ranks with one big process: the same samples, in the same order."""
    whole = take(3, name, inputs, batch_size=6, seed=1)
    parts = [take(3, name, inputs, rank=rank, world=3, batch_size=2, seed=1) for rank in range(3)]
    for step, expected in enumerate(whole):
        joined = {key: torch.cat([part[step][key] for part in parts]) for key in expected}
        assert same(joined, expected)


@every_source
def test_a_run_continues_from_any_step(name: str, inputs: Inputs) -> None:
    assert all(map(same, take(5, name, inputs)[3:], take(2, name, inputs, first_step=3)))


def test_workers_change_no_batch_and_draw_nothing_from_torch_s_generator() -> None:
    before = torch.get_rng_state()
    stream = batches("synthetic", TEXT, rank=1, world=2, batch_size=2, seed=3, first_step=5, workers=2)
    ahead = list(itertools.islice(stream, 4))
    assert all(map(same, ahead, take(4, "synthetic", TEXT, rank=1, world=2, batch_size=2, seed=3, first_step=5)))
    assert torch.get_rng_state().equal(before)


# ---- splitting, as a property. A window's position in a counting text tells which sample it is.


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> int:
    """100 samples of one byte each, whose content is their index."""
    monkeypatch.setattr("experiments.tasks.builtin.text", lambda **_: np.arange(101, dtype=np.uint8))
    return 100


def samples_seen(epoch: int, rank: int, world: int, batch_size: int, seed: int) -> list[int]:
    per_epoch = 100 // (world * batch_size)
    stream = batches(
        "stdlib_bytes", Tokens(sequence=1), rank=rank, world=world, batch_size=batch_size, seed=seed, first_step=epoch * per_epoch
    )
    return [int(i) for batch in itertools.islice(stream, per_epoch) for i in batch["input_ids"].flatten()]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**63), world=st.integers(1, 7), batch_size=st.integers(1, 14), epoch=st.integers(0, 3))
def test_no_sample_is_seen_twice_in_an_epoch(seed: int, world: int, batch_size: int, epoch: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.tasks.builtin.text", lambda **_: np.arange(101, dtype=np.uint8))
        seen = [i for rank in range(world) for i in samples_seen(epoch, rank, world, batch_size, seed)]
    assert len(seen) == len(set(seen)) == 100 // (world * batch_size) * world * batch_size
    assert set(seen) <= set(range(100))


def test_each_epoch_has_its_own_order_and_a_number_of_epochs_drops_the_remainder(numbered: int) -> None:
    epochs = [samples_seen(epoch, 0, 1, 10, seed=0) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(numbered)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    stream = batches("stdlib_bytes", Tokens(1), rank=1, world=2, batch_size=7, epochs=2, held_out=True)
    assert len(list(stream)) == 2 * (numbered // 14)


# ---- text


def test_a_causal_label_is_the_next_byte_of_the_text(numbered: int) -> None:
    windows = Tokens(sequence=4)
    for batch in itertools.islice(batches("stdlib_bytes", windows, batch_size=5), 3):
        assert batch["labels"].equal(batch["input_ids"] + 1)
        assert batch["input_ids"][:, 0].remainder(4).eq(0).all(), "windows do not overlap"


def test_the_text_is_the_standard_library_and_read_only() -> None:
    whole = text()
    assert whole.dtype == np.uint8 and whole.ndim == 1
    assert len(whole) > 1_000_000
    words = whole.tobytes()
    assert words.count(b"def ") > 1_000
    assert b"import torch" not in words, "an installed package is not the standard library"
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 0
    assert words.startswith(text(max_bytes=1_000).tobytes())
    assert len(text(max_bytes=1_000)) == 1_000


def test_held_out_text_is_not_in_the_training_text() -> None:
    held_out, trained = text(held_out=True), text().tobytes()
    assert 0.02 < len(held_out) / len(trained) < 0.3
    starts = range(0, len(held_out) - 400, 25_000)
    shared = [start for start in starts if held_out[start : start + 400].tobytes() in trained]
    assert len(shared) <= len(starts) // 20, "a licence or two may be in both"


def test_masking_asks_for_the_same_number_of_positions_in_every_sequence() -> None:
    hidden = unchanged = randomized = 0
    for batch in take(20, "stdlib_bytes", MASKED, batch_size=8):
        asked = batch["labels"] != IGNORED
        assert asked.sum(dim=1).tolist() == [6] * 8  # 15 % of 40
        tokens, labels = batch["input_ids"][asked], batch["labels"][asked]
        assert labels.max() < 256, "the mask token is never an answer"
        assert not (batch["input_ids"][~asked] == MASKED.mask_token).any()
        hidden += int((tokens == MASKED.mask_token).sum())
        unchanged += int((tokens == labels).sum())
        randomized += int(((tokens != labels) & (tokens != MASKED.mask_token)).sum())
    total = 20 * 8 * 6
    assert hidden + unchanged + randomized == total
    assert hidden / total == pytest.approx(0.8, abs=0.05)
    assert unchanged / total == pytest.approx(0.1, abs=0.04)
    assert randomized / total == pytest.approx(0.1, abs=0.04)


def test_a_sample_is_masked_anew_in_each_epoch(numbered: int) -> None:
    masked = Tokens(sequence=50, masked=True)  # two samples, so an epoch is one batch
    first, second = itertools.islice(batches("stdlib_bytes", masked, batch_size=2), 2)
    original = [torch.where(b["labels"] != IGNORED, b["labels"], b["input_ids"]) for b in (first, second)]
    assert sorted(original[0].tolist()) == sorted(original[1].tolist())
    assert sorted(first["labels"].tolist()) != sorted(second["labels"].tolist())


# ---- images


def test_held_out_digits_are_others_and_all_classes_are_there() -> None:
    def epoch(held_out: bool) -> tuple[set[bytes], set[int]]:
        stream = batches("digits", VECTORS, batch_size=1, held_out=held_out, epochs=1)
        pairs = [(b["inputs"].numpy().tobytes(), int(b["labels"])) for b in stream]
        return {image for image, _ in pairs}, {label for _, label in pairs}

    (train, train_labels), (held_out, held_out_labels) = epoch(False), epoch(True)
    assert train.isdisjoint(held_out)
    assert len(train) + len(held_out) == 1797
    assert train_labels == held_out_labels == set(range(10))


# ---- pairs of sentences


def sentence(ids: list[int]) -> str:
    return bytes(ids).decode()


def test_a_pair_is_two_sentences_of_bytes_with_the_label_of_its_row() -> None:
    rows = {(r["premise"], r["hypothesis"]): r["label"] for r in map(json.loads, SHIPPED.read_text().splitlines())}
    assert len(rows) == 120 and set(rows.values()) == {0, 1, 2}
    for batch in take(5, "nli", SENTENCES):
        for ids, kinds, mask, label in zip(*(batch[key].tolist() for key in batch), strict=True):
            first, second = ids.index(SEP), len(ids) - 1 - ids[::-1].index(SEP)
            assert ids[0] == CLS and set(ids[second + 1 :]) <= {PAD}
            assert rows[sentence(ids[1:first]), sentence(ids[first + 1 : second])] == label
            assert mask == [1] * (second + 1) + [0] * (len(ids) - second - 1)
            assert kinds == [0] * (first + 1) + [1] * (second - first) + [0] * (len(ids) - second - 1)


def test_long_sentences_are_cut_to_what_fits() -> None:
    (batch,) = take(1, "nli", Pairs(sequence=16, vocabulary=259, classes=3))
    for ids in batch["input_ids"].tolist():
        assert (ids.count(CLS), ids.count(SEP), ids.count(PAD)) == (1, 2, 0) and ids.index(SEP) in (7, 8)


def test_a_source_of_splits_and_rows_without_a_label(tmp_path: Path) -> None:
    import datasets

    def made(words: list[str], labels: list[int]) -> Any:
        return datasets.Dataset.from_dict({"premise": words, "hypothesis": words, "label": labels})

    datasets.DatasetDict(train=made(["a", "b", "c"], [0, -1, 2]), validation_matched=made(["d"], [1])).save_to_disk(tmp_path)
    source = Nli(path=str(tmp_path), batch_size=1)
    train = [batch["labels"].item() for batch in source.batches(SENTENCES, rank=0, world=1, epochs=1)]
    [other] = source.batches(SENTENCES, rank=0, world=1, epochs=1, held_out=True)
    assert sorted(train) == [0, 2] and other["labels"].item() == 1


def test_words_of_a_tokenizer(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "is", "outside"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "made")
    source = Nli(tokenizer=str(tmp_path / "made"), batch_size=96)
    [batch] = source.batches(Pairs(sequence=24, vocabulary=9, classes=3), rank=0, world=1, epochs=1)
    ids = batch["input_ids"]
    assert ids.shape == (96, 24) and ids.max() < 9 and (ids[:, 0] == 2).all()
    assert (ids == 3).sum(dim=1).tolist() == [2] * 96


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("text,label\na,1\n")
    with pytest.raises(ValueError, match=r"other.csv has no hypothesis, premise; its columns: text, label"):
        Nli(path=str(tmp_path / "other.csv")).batches(SENTENCES, rank=0, world=1)


def test_text_is_packed_into_windows_of_a_tokenizer_s_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the word n, 0 to 99, with ends of text between them: windows of 4 tokens overlap by the label of the last."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = {str(n): n for n in range(100)} | {"<end>": 100, "<unknown>": 101}
    made = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>").save_pretrained(tmp_path / "made")
    (tmp_path / "numbers.txt").write_text("\n".join(map(str, range(100))))
    source = Text(path=str(tmp_path / "numbers.txt"), tokenizer=str(tmp_path / "made"), batch_size=1)
    with pytest.raises(ValueError, match="text needs a vocabulary of 102, the model has 100"):
        source.require(Tokens(4, 100))
    found = {held_out: {
        tuple(b["input_ids"][0].tolist()): b["labels"][0].tolist()
        for b in source.batches(Tokens(4, 102), rank=0, world=1, epochs=1, held_out=held_out)
    } for held_out in (False, True)}  # fmt: skip
    assert (len(found[False]), len(found[True])) == (45, 4)
    assert found[False][0, 100, 1, 100] == [100, 1, 100, 2] and found[True][18, 100, 19, 100] == [100, 19, 100, 20]


@pytest.mark.parametrize("rows", [3000, 1500])
def test_windows_of_text_go_on_over_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rows of two bytes, which are read in thousands: a window of 2,500 has more than a thousand rows."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "lines.txt").write_text("\n".join("a" * rows))
    source = Text(path=str(tmp_path / "lines.txt"), batch_size=1)
    found = [*source.batches(Tokens(2500, 256), rank=0, world=1, epochs=1)]
    assert len(found) == (2 * rows - 1) // 2500
    assert all(b["input_ids"][0].tolist() == [97, 10] * 1250 and b["labels"][0].tolist() == [10, 97] * 1250 for b in found)


# ---- refusals, at the call and not at the first batch


@pytest.mark.parametrize(
    ("name", "inputs", "options", "words"),
    [
        ("digits", TEXT, {}, "digits gives images"),
        ("stdlib_bytes", PICTURES, {}, "stdlib_bytes gives tokens"),
        ("stdlib_bytes", Tokens(8, vocabulary=100), {}, "needs a vocabulary of 256, the model has 100"),
        ("digits", Images(8, 1, classes=5), {}, "digits has 10 classes, the model has 5"),
        ("synthetic", TEXT, {"rank": 2}, "got rank 2 of world 2"),
        ("synthetic", TEXT, {"batch_size": 0}, "batch_size must be >= 1"),
        ("synthetic", TEXT, {"seed": -1}, "seed must be >= 0"),
        ("digits", PICTURES, {"batch_size": 900}, "1618 training samples, fewer than one global batch"),
        ("stdlib_bytes", TEXT, {"max_bytes": 65}, "has 2 training samples"),
    ],
)
def test_what_cannot_be_given_is_refused_with_a_reason(name: str, inputs: Inputs, options: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        batches(name, inputs, **{"world": 2, **options})


class Sound:
    """Inputs of a model that is not ours."""

    def sample(self, random: np.random.Generator) -> dict[str, object]:
        return {"wave": random.standard_normal(5, dtype=np.float32), "labels": random.integers(0, 3)}


def test_synthetic_makes_samples_of_inputs_of_one_s_own() -> None:
    """Seeded: sample by sample the same, whatever the number of ranks."""
    whole = next(Synthetic(batch_size=4).batches(Sound(), rank=0, world=1))
    assert (whole["wave"].shape, whole["wave"].dtype, whole["labels"].shape) == ((4, 5), torch.float32, (4,))
    parts = [next(Synthetic(batch_size=2).batches(Sound(), rank=rank, world=2)) for rank in (0, 1)]
    assert all(torch.equal(torch.cat([part[name] for part in parts]), whole[name]) for name in whole)


class Mute:
    """Inputs that say nothing of themselves."""


@pytest.mark.parametrize("name", SOURCES)
def test_inputs_that_no_source_knows_are_refused_by_name(name: str) -> None:
    remedy = r": give Mute a method sample\(random\) that" if name == "synthetic" else "; use another source, or synthetic$"
    with pytest.raises(ValueError, match=rf"^{name} .*the model reads Mute{remedy}"):
        SOURCES[name]().require(Mute())  # type: ignore[arg-type]
