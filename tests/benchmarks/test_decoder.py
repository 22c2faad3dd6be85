"""Decoders: parameters that their authors count, operations and bytes of a block."""

from dataclasses import replace

import pytest

from benchmarks.layers import Decoder

LLAMA_2_7B = Decoder(32, 4096, 32, 32, 11008, 32000)
LLAMA_3_8B = Decoder(32, 4096, 32, 8, 14336, 128256)
MPT_7B = Decoder(32, 4096, 32, 32, 16384, 50368, gated=False, tied=True, positions=2048, biases=True)
MIXTRAL = Decoder(32, 4096, 32, 8, 14336, 32000, experts=8, active=2)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [(LLAMA_2_7B, 6_738_415_616), (LLAMA_3_8B, 8_030_261_248), (MPT_7B, 6_658_859_008), (MIXTRAL, 46_702_792_704)],
)
def test_models_have_the_parameters_that_are_published(model, parameters):
    assert sum(layer.parameters for layer in model.of_batch(1, 16)) == parameters


def test_a_block_of_llama_3_keeps_what_flash_attention_leaves():
    block = LLAMA_3_8B.of_batch(1, 8192)[1]
    # Six tensors of the width, keys and values of a quarter of it, four of the MLP's width.
    assert block.kept == 2 * 8192 * (6 * 4096 + 2 * 1024 + 4 * 14336)
    assert block.kept / 2**20 == pytest.approx(1413, rel=0.08)  # as Galvatron measured it, in MiB
    assert block.output == 64 * 2**20
    assert block.parameters * 4 / 2**20 == pytest.approx(832.25, rel=0.001)


def test_every_second_matrix_product_of_a_llama_is_repeated():
    block = LLAMA_3_8B.of_batch(1, 16, every_second=True)[1]
    assert block.kept - block.cheap == 2 * 16 * (4 * 4096 + 1024 + 14336)
    assert block.repeated == 2 * 16 * 4096 * (1024 + 4096 + 14336)


def test_operations_are_two_per_parameter_and_token_and_attention():
    tokens, block = 2 * 16, MPT_7B.of_batch(2, 16)[1]
    assert block.operations == tokens * (2 * 12 * 4096**2 + 4 * 16 * 4096)


def test_a_token_uses_its_experts_only():
    sparse, dense = (model.of_batch(1, 16)[1] for model in (MIXTRAL, replace(MIXTRAL, experts=1, active=1)))
    mlp = 3 * 4096 * 14336
    assert sparse.operations - dense.operations == 2 * 16 * mlp
    assert sparse.parameters - dense.parameters == 7 * mlp + 8 * 4096


def test_log_probabilities_of_16_bit_take_half():
    wide, narrow = (LLAMA_2_7B.of_batch(1, 16, loss_bytes=size)[-1] for size in (4, 2))
    assert wide.kept - narrow.kept == 2 * 16 * 32000 and wide.workspace == 2 * narrow.workspace
