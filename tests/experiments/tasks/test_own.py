"""One's own model, data and optimizer: a callable as `_target_`, its arguments as keys, nested values, what is refused."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from experiments.config import checks
from experiments.config.identity import job_identity
from experiments.config.schema import ConfigError
from experiments.job.workload import wrap_policy
from experiments.tasks.data import Tokens
from mdcs import partition

HERE = "tests.experiments.tasks.test_own"


@pytest.fixture(autouse=True, scope="module")
def composing():
    """Once for all, as in config/conftest.py."""
    with checks.composing():
        yield


def composed(*overrides: str):
    return checks.compose_config(overrides)


class Block(nn.Sequential):
    """A layer that repeats."""


def build(width: int, depth=2, activation: nn.Module | None = None):
    layers = [Block(nn.Linear(width, width), activation or nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))


def anything(**options):
    return build(**options)


def named(name: str):
    return build(8)


def reading(inputs):
    return build(8)


def no_module():
    return 3


part = partial(build, 8)


class Factory:
    @classmethod
    def small(cls, width: int = 4):
        return build(width)


def scaled(model, batch, scale=1.0):
    return scale * model(batch["input_ids"]).square().mean()


def model(*overrides: str, target: str = "build"):
    return composed("model=own", f"model._target_={HERE}.{target}", *overrides)


def test_arguments_are_keys_and_values_may_be_nested():
    config = model("model.width=8", "model.activation._target_=torch.nn.GELU")
    built = config.model.build().model
    assert built[1][0].in_features == 8 and isinstance(built[1][1], nn.GELU) and len(built) == 4
    assert config.model.name == "build" and config.model.inputs == Tokens(64)


def test_a_class_method_a_function_of_any_arguments_and_a_partial_do_as_well():
    for target in ("anything", "Factory.small"):
        assert model("model.width=6", target=target).model.build().model[0].embedding_dim == 6
    assert model(target="part").model.name == "part"
    built = model("model._args_=[8,3]", target="build").model.build().model  # arguments may be positional
    assert built[1][0].in_features == 8 and len(built) == 5
    with pytest.raises(TypeError, match="no_module returned int, not a torch.nn.Module"):
        model(target="no_module").model.build()


def test_a_saved_config_makes_the_same_model(tmp_path):
    config = model("model.width=8", "model.reads.sequence=16", "model.name=mine")
    checks.save(config, tmp_path / "config.yaml")
    loaded = checks.load(tmp_path / "config.yaml")
    assert loaded.model == config.model and loaded.model.name == "mine" and loaded.model.inputs == Tokens(16)
    assert job_identity(loaded) == job_identity(config) != job_identity(model("model.width=9"))
    nested = [job_identity(model("model.width=8", f"model.activation._target_=torch.nn.{name}")) for name in ("GELU", "SiLU")]
    assert nested[0] != nested[1]


def test_units_are_the_classes_that_are_named_or_repeated_blocks():
    config = model("model.width=8", "model.depth=5")
    task = config.model.build()
    assert {"1", "2", "3", "4", "5"} <= {unit.name for unit in partition(task.model, wrap_policy(config, task.block_classes))}
    config = model("model.width=8", "model.depth=5", "model.blocks=[GELU,Embedding]")
    assert wrap_policy(config, config.model.build().block_classes).roots(task.model) == {"0"}


def test_a_loss_may_be_partial():
    config = model("model.width=8", f"model.loss={{_target_: {HERE}.scaled, _partial_: true, scale: 3.0}}")
    task = config.model.build()
    assert isinstance(task.loss, partial)
    batch = task.example_batch(2)
    assert torch.equal(task.loss(task.model, batch), 3 * scaled(task.model, batch))


@pytest.mark.parametrize(
    ("target", "overrides", "line"),
    [
        ("build", ["model.widht=8"], "model.widht: no such key of model=own; did you mean model.width?"),
        ("build", [], f"model.width: is an argument that {HERE}.build needs"),
        ("nothing", [], f"model._target_: {HERE}.nothing: {HERE} has no nothing"),
        ("named", [], f"model._target_: {HERE}.named: its argument name has the name of a key of every model"),
        ("build", ["model._args_=3"], "model._args_: must be a list of arguments in their order, got 3"),
        ("build", ["model.width=8", "model.reads.sequnce=3"], "model.reads.sequnce: Key 'sequnce' not in 'Tokens'"),
        ("build", ["model.width=8", "model.reads.sequence=abc"], "model.reads.sequence: Value 'abc' of type 'str' could not"),
        ("build", ["model.width=8", "model.reads=3"], "model.reads: must be keys and values, e.g. {sequence: 128}; got 3"),
        ("build", ["model.width=8", "model.reads=[1]"], "model.reads: has another type, got [1]"),
        ("build", ["model.width=8", "model.loss=nonsense"], "model.loss: must be null or a mapping with _target_, got nonsense"),
        ("build", ["model.width=8", "model.loss={_target_: no.such}"], "model.loss: has _target_=no.such: "),
        ("build", ["model.width=8", "model.activation._target_=torch.nn.Gelu"], "model.activation: has _target_=torch.nn.Gelu: "),
        ("reading", [], f"model._target_: {HERE}.reading: its argument inputs has the name of a key of every model"),
        ("Rows", ["data.count=9.5"], "data.count: must be an integer or null, got 9.5"),
        ("Rows", [], f"data.count: is an argument that {HERE}.Rows needs"),
        ("Rows", ["data.count=9", "data.collate=nonsense"], "data.collate: must be null or a mapping with _target_, got"),
        ("Rows", ["data.count=9", "data.held_out=true"], "data.held_out: no such key of data=own"),
        ("loaded", ["data.count=9", "run.eval_every=2"], "run.eval_every: needs held-out samples: "),
    ],
)
def test_a_mistake_is_one_line(target, overrides, line, caplog):
    with pytest.raises(ConfigError) as error:
        (data if target in ("Rows", "loaded") else model)(*overrides, target=target)
    assert str(error.value).startswith(line) and "\n" not in str(error.value) and not caplog.records


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["data=own", "data._target_=json.loads", "data.s=abc"], "data._target_=json.loads raised JSONDecodeError: Expecting"),
        (["model=own", "model._target_=json.loads", "model.s={_target_: json.loads, s: a}"], "model._target_=json.loads raised"),
        (["optimizer=own", "optimizer._target_=torch.optim.RMSprop", "optimizer.alpha=-1"],
         "optimizer._target_=torch.optim.RMSprop raised ValueError: Invalid alpha value: -1"),
    ],
)  # fmt: skip
def test_what_a_callable_raises_is_one_line_with_its_key(overrides, line):
    config = composed(*overrides)
    with pytest.raises(ValueError) as caught:
        if overrides[0] == "model=own":
            config.model.build()
        elif overrides[0] == "data=own":
            config.data.samples(config.model.inputs, False)
        else:
            config.optimizer.make([nn.Parameter(torch.zeros(3))])
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


# ---- models of a folder


def test_a_model_that_save_pretrained_has_left_is_loaded_by_its_name(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    saved = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_layer=1, n_embd=8, n_head=2))
    saved.save_pretrained(tmp_path)
    target = "transformers.AutoModelForCausalLM.from_pretrained"
    config = composed("model=own", f"model._target_={target}", f"model._args_=[{tmp_path}]")
    built = config.model.build().model
    assert torch.equal(built.transformer.wte.weight, saved.transformer.wte.weight)


# ---- data


class Rows(torch.utils.data.Dataset):
    """Numbers and their squares."""

    def __init__(self, count: int, held_out: bool = False, sign: int = 1):
        self.values = torch.arange(count) * (-sign if held_out else sign)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index], self.values[index] ** 2


class Endless(torch.utils.data.IterableDataset):
    """Numbers from `first` on, 7 in an epoch."""

    def __init__(self, first: int):
        self.first = first

    def __iter__(self):
        return iter(range(self.first, self.first + 7))


def loaded(count: int):
    return torch.utils.data.DataLoader(Rows(count), batch_size=3, collate_fn=doubled)


def doubled(samples, times=2):
    return {"inputs": times * torch.stack([value for value, _ in samples])}


def words(path: str, seed: int = 0, stream: bool = False):
    import datasets

    made = datasets.Dataset.from_dict({"input_ids": [[n, n + 1, n + 2] for n in range(8)], "labels": [[n] * 3 for n in range(8)]})
    return made.to_iterable_dataset() if stream else made


def data(*overrides: str, target: str):
    return composed("data=own", f"data._target_={HERE}.{target}", "data.batch_size=2", *overrides).data


def batches(source, count: int, **options):
    given = {"rank": 0, "world": 1, **options}
    return [*itertools.islice(source.batches(Tokens(64), **given), count)]


def test_any_dataset_is_data_whose_ranks_share_the_global_batches():
    source = data("data.count=9", target="Rows")
    whole = batches(data("data.count=9", "data.batch_size=4", target="Rows"), 3)
    parts = [batches(source, 3, rank=rank, world=2) for rank in (0, 1)]
    for step, batch in enumerate(whole):
        assert torch.equal(torch.cat([part[step]["inputs"] for part in parts]), batch["inputs"])
        assert torch.equal(batch["labels"], batch["inputs"] ** 2)
    assert source.evaluates and batches(source, 1, held_out=True)[0]["inputs"].max() <= 0


def test_a_dataloader_gives_its_samples_and_its_collate_unless_the_config_has_one():
    assert set(batches(data("data.count=9", target="loaded"), 1)[0]) == {"inputs"}
    partial = f"data.collate={{_target_: {HERE}.doubled, _partial_: true, times: 0}}"
    assert batches(data("data.count=9", partial, target="loaded"), 1)[0]["inputs"].tolist() == [0, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_read_in_its_order_by_any_number_of_workers(workers):
    """7 numbers per epoch make one global batch of 2 ranks with 3, and the rest is left out."""
    collate = f"data.collate={{_target_: {HERE}.stacked, _partial_: true}}"
    source = data("data.first=10", collate, "data.batch_size=3", target="Endless")
    found = [[batch["inputs"].tolist() for batch in batches(source, 3, rank=rank, world=2, workers=workers)] for rank in (0, 1)]
    assert found == [3 * [[10, 11, 12]], 3 * [[13, 14, 15]]]
    source = data("data.first=10", collate, "data.batch_size=3", target="Endless")
    later = [batch["inputs"].tolist() for batch in batches(source, 3, workers=workers, first_step=1)]
    assert later == [[13, 14, 15], [10, 11, 12], [13, 14, 15]]


def stacked(samples):
    return {"inputs": torch.tensor(samples)}


def test_rows_of_datasets_are_tensors_and_have_tokens():
    source = data("data.path=x", target="words")
    assert batches(source, 1)[0]["input_ids"].shape == (2, 3) and source.tokens(Tokens(64)) == 3
    stream = data("data.path=x", "data.stream=true", target="words")
    assert [batch["input_ids"].tolist() for batch in batches(stream, 2, rank=1, world=2)] == [
        [[2, 3, 4], [3, 4, 5]], [[6, 7, 8], [7, 8, 9]],
    ]  # fmt: skip


# ---- optimizers


def test_any_optimizer_is_made_of_its_arguments(tmp_path):
    config = composed("optimizer=own", "optimizer._target_=torch.optim.RMSprop", "optimizer.alpha=0.9")
    checks.save(config, tmp_path / "config.yaml")
    made = checks.load(tmp_path / "config.yaml").optimizer.make([nn.Parameter(torch.zeros(3))])
    assert type(made) is torch.optim.RMSprop and made.defaults["alpha"] == 0.9 and made.defaults["lr"] == 0.01
    assert config.optimizer.schedule == "constant" and config.optimizer.name == "RMSprop"
