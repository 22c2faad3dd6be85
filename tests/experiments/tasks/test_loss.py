"""The loss that a model gets by default: cross-entropy where classes are last, or second as torch has it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from experiments.tasks.data import IGNORED
from experiments.tasks.task import cross_entropy


class Answers(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, x):
        return self.answer


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (4, 5, 3, 2)])
def test_classes_may_be_last_or_second(shape):
    logits, labels = torch.randn(shape), torch.randint(5, (shape[0], *shape[2:]))
    expected = functional.cross_entropy(logits, labels)
    for given in (logits, logits.movedim(1, -1)):
        loss = cross_entropy(Answers(given), {"x": torch.zeros(4), "labels": labels})
        torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("answer", "labels"),
    [
        (torch.zeros(4, 7), torch.zeros(4, 2, dtype=torch.long)),
        (torch.zeros(4, 1), torch.zeros(4)),
        ((torch.zeros(4, 7),), torch.zeros(4, dtype=torch.long)),
    ],
)
def test_what_has_no_classes_names_the_key(answer, labels):
    with pytest.raises(ValueError, match=r"model\.loss"):
        cross_entropy(Answers(answer), {"x": torch.zeros(4), "labels": labels})


def test_loss_is_the_mean_over_labelled_positions_only():
    """The certain middle position has no say."""
    answer = torch.tensor([[[0.0, 0.0], [9.0, -9.0], [0.0, 0.0]]])
    loss = cross_entropy(Answers(answer), {"x": torch.zeros(1), "labels": torch.tensor([[0, IGNORED, 1]])})
    assert loss.item() == pytest.approx(math.log(2))
