"""Rates of a step, and the FLOPs that they are compared with."""

import pytest
import torch
from torch import nn

from experiments.job.workload import Throughput, Workload, throughput_of
from tests.experiments.batch import composed


def throughput(*overrides: str, change=None) -> Throughput:
    config = composed("data=synthetic", "data.batch_size=3", "run.accumulation=2", *overrides)
    workload = Workload(config, 0, 2, torch.device("cpu"))
    if change:
        change(workload.model)
    return throughput_of(workload)


def test_flops_are_three_times_those_of_the_forward_pass():
    """A multilayer perceptron 64 → 32 → 10: 2 · (64 · 32 + 32 · 10) FLOPs per sample; a device of 1 GFLOP/s."""
    made = throughput("model=mlp", "model.depth=2", "model.width=32", "cluster.peak_tflops=0.001")
    flops = 3 * 2 * (64 * 32 + 32 * 10) * 3 * 2
    assert made.flops == flops
    assert made.in_step(0.1) == {"throughput_samples_s": pytest.approx(120), "mfu": pytest.approx(flops / 0.1 / 1e9)}


def test_checkpointing_adds_no_flops_and_tokens_are_counted():
    given = "model=gpt2-tiny", "cluster.peak_tflops=1"
    made = throughput(*given)
    assert made == throughput(*given, "model.checkpointing=true")
    assert made.tokens == 2 * 3 * 2 * 64 and made.in_step(2)["throughput_tokens_s"] == made.tokens / 2


def test_a_model_that_reads_values_has_no_mfu():
    def reads_values(model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda module, args: args[0].sum().item() and None)

    made = throughput("model=gpt2-tiny", "cluster.peak_tflops=1", change=reads_values)
    assert made.flops is None and "mfu" not in made.in_step(1) and made.tokens == 3 * 2 * 2 * 64


@pytest.mark.parametrize("given", [["model=gpt2-tiny"], ["model=timed", "cluster.peak_tflops=1"]])
def test_without_a_peak_or_compute_there_is_no_mfu(given):
    made = throughput(*given)
    assert made.flops is None and "mfu" not in made.in_step(1)
