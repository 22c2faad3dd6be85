"""A model of transformers as a model of the programs: `build_model` returns the module, its arguments are keys.

    mdcs train model=own model._target_=examples.own_model.gpt2.build_model model.layers=4
    mdcs curve model=own model._target_=examples.own_model.gpt2.build_model budget=floor+20% curve.measure=stop

The module reads what `model.reads` says, tokens by default: a batch has `input_ids` and `labels`, the next tokens. The
loss is the cross-entropy of the logits.
"""

from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel


def build_model(
    layers: int = 2, width: int = 64, heads: int = 4, vocab: int = 256, weights: str | None = None
) -> nn.Module:
    """Build a GPT-2 of these sizes, or load the model that `save_pretrained` has left in a folder."""
    if weights is not None:
        return AutoModelForCausalLM.from_pretrained(weights, local_files_only=True)
    config = GPT2Config(
        vocab_size=vocab, n_layer=layers, n_embd=width, n_head=heads, n_positions=1024, use_cache=False,
        bos_token_id=None, eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)
