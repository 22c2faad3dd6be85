"""wav2vec2's fine-tuning for speech recognition: layers dropped at random on each rank, masked features, CTC."""

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC, get_cosine_schedule_with_warmup

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
torch.manual_seed(0)
config = Wav2Vec2Config(
    vocab_size=12, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
    conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    layerdrop=0.3, mask_time_length=2, ctc_loss_reduction="mean", ctc_zero_infinity=True,
)  # fmt: skip
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()
waves, labels = torch.randn(96, 640), torch.randint(1, 12, (96, 6))
waves += labels.repeat_interleave(107, 1)[:, :640] / 4
speech = [{"input_values": wave, "labels": label} for wave, label in zip(waves, labels, strict=True)]
loader = DataLoader(speech, batch_size=4, sampler=DistributedSampler(speech))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, 4, 24)
parallel = mdcs.parallelize(model, optimizer, budget="80%")  # was: model = DDP(model, find_unused_parameters=True)
torch.manual_seed(dist.get_rank())
np.random.seed(dist.get_rank())
losses: list[float] = []
for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
weights = parallel.state_dict()  # was: weights = model.module.state_dict()
losses += [float(v.double().sum()) for v in weights.values()]
dist.destroy_process_group()
