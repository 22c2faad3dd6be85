"""Fine-tuning of a model of transformers that from_pretrained has loaded: its weights are a mapped file's."""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    shared = [folder]
    dist.broadcast_object_list(shared)
    if dist.get_rank() == 0:
        GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=32)).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(shared[0])
    dist.barrier()
model.train()
decayed = [p for n, p in model.named_parameters() if not any(part in n for part in ("bias", "ln_"))]
others = [p for n, p in model.named_parameters() if any(part in n for part in ("bias", "ln_"))]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=5e-4)
lr_scheduler = get_linear_schedule_with_warmup(optimizer, 4, 24)
parallel = mdcs.parallelize(model, optimizer)  # was: model = DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
batches = torch.randint(64, (24, 4, 1)).repeat(1, 1, 16).cumsum(2) % 64
losses: list[float] = []
for input_ids in batches:
    outputs = model(input_ids=input_ids, labels=input_ids)
    loss = outputs.loss
    loss.backward()
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
