"""accelerate's loop, in the style of transformers' run_clm_no_trainer, with a Mixtral. Each line that is mdcs's is
marked.

torchrun --nproc-per-node 2 examples/accelerate_loop.py

`accelerator.prepare` comes first, as always, and puts the model into DistributedDataParallel: `parallelize` takes it
out again. Accumulation, schedules, shares of the data, `autocast` and gathering are accelerate's.
"""

import tempfile

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM, default_data_collator, get_scheduler

import mdcs  # new

accelerator = Accelerator(
    cpu=True,
    gradient_accumulation_steps=2,
    kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
)
torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=4, max_position_embeddings=32, output_router_logits=True,
)  # fmt: skip
model = MixtralForCausalLM(config)
texts = torch.randint(64, (112, 1)).repeat(1, 16).cumsum(1) % 64
examples = [{"input_ids": text, "labels": text} for text in texts]
train_dataloader = DataLoader(examples[:96], shuffle=True, collate_fn=default_data_collator, batch_size=2)
eval_dataloader = DataLoader(examples[96:], collate_fn=default_data_collator, batch_size=4)
no_decay = ["bias", "layer_norm.weight"]
grouped = [
    {"params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)], "weight_decay": 0.1},
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(grouped, lr=5e-3)
lr_scheduler = get_scheduler("linear", optimizer, num_warmup_steps=4, num_training_steps=60 * accelerator.num_processes)
model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
)
parallel = mdcs.parallelize(model, optimizer, budget="80%")  # new
losses: list[float] = []
for _ in range(2):
    model.train()
    for batch in train_dataloader:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
    model.eval()
    held_out = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        held_out.append(accelerator.gather_for_metrics(outputs.loss.repeat(4)))
    losses.append(torch.cat(held_out).mean().item())
accelerator.wait_for_everyone()
unwrapped_model = accelerator.unwrap_model(model)
whole = parallel.state_dict()  # was: whole = unwrapped_model.state_dict()
folder = tempfile.mkdtemp()
unwrapped_model.save_pretrained(
    folder, state_dict=whole, is_main_process=accelerator.is_main_process, save_function=accelerator.save
)
if accelerator.is_main_process:
    saved = MixtralForCausalLM.from_pretrained(folder)
    losses += [float(v.double().sum()) for v in saved.state_dict().values()]
    print(f"loss {losses[0]:.4f}, then {losses[47]:.4f}")
accelerator.end_training()
