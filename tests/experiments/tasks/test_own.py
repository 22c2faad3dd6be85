"""A model of one's own: a callable as `_target_`, its arguments as keys, nested values, and what is refused."""

from functools import partial

import pytest
import torch
from torch import nn

from experiments.config import checks
from experiments.config.identity import job_identity
from experiments.config.schema import ConfigError
from experiments.job.workload import wrap_policy
from experiments.tasks.inputs import Tokens
from mdcs import partition

HERE = "tests.experiments.tasks.test_own"


class Block(nn.Sequential):
    """A layer that repeats."""


def build(width: int, depth=2, activation: nn.Module | None = None):
    layers = [Block(nn.Linear(width, width), activation or nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Embedding(256, width), *layers, nn.Linear(width, 256))


def anything(**options):
    return build(**options)


def named(name: str):
    return build(8)


def no_module():
    return 3


class Factory:
    @classmethod
    def small(cls, width: int = 4):
        return build(width)


def scaled(model, batch, scale=1.0):
    return scale * model(batch["input_ids"]).square().mean()


def model(*overrides: str, target: str = "build"):
    with checks.composing():
        return checks.compose_config(["model=own", f"model._target_={HERE}.{target}", *overrides])


def test_arguments_are_keys_and_values_may_be_nested():
    config = model("model.width=8", "model.activation._target_=torch.nn.GELU")
    built = config.model.build().model
    assert built[1][0].in_features == 8 and isinstance(built[1][1], nn.GELU) and len(built) == 4
    assert config.model.name == "build" and config.model.inputs == Tokens(64)


@pytest.mark.parametrize("target", ["anything", "Factory.small"])
def test_a_class_method_and_a_function_of_any_arguments_do_as_well(target):
    assert model("model.width=6", target=target).model.build().model[0].embedding_dim == 6


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
        ("nothing", [], f"model: _target_ {HERE}.nothing: {HERE} has no class nothing"),
        ("named", [], f"model: _target_ {HERE}.named: its argument name has the name of an option of all models"),
        ("build", ["model.width=8", "model.reads.sequnce=3"], "model.reads: makes no inputs: "),
    ],
)
def test_a_mistake_is_one_line(target, overrides, line):
    with pytest.raises(ConfigError) as error:
        model(*overrides, target=target)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_what_is_no_module_is_said():
    with pytest.raises(TypeError, match="no_module returned int, not a torch.nn.Module"):
        model(target="no_module").model.build()


def reading(inputs=3):
    return build(8)


@pytest.mark.parametrize(
    ("overrides", "target", "line"),
    [
        (["model.loss=nonsense"], "build", "model.loss: must be null or a mapping with _target_, got nonsense"),
        (["model.loss={_target_: no.such}"], "build", "model.loss: has _target_=no.such: "),
        (["model.activation._target_=torch.nn.Gelu"], "build", "model.activation: has _target_=torch.nn.Gelu: "),
        ([], "reading", f"model: _target_ {HERE}.reading: its argument inputs has a name that all models use"),
    ],
)
def test_what_is_named_and_is_not_there_is_one_line_before_anything_starts(overrides, target, line):
    with pytest.raises(ConfigError) as caught:
        model("model.width=8", *overrides, target=target) if target == "build" else model(target=target)
    assert str(caught.value).startswith(line)


part = partial(build, 8)


def test_a_partial_is_a_target_too():
    assert model(target="part").model.name == "part"
