"""diffusers' training of an unconditional model, from a pretrained one: noise is predicted, and its scheduler adds it."""

import tempfile

import torch
import torch.distributed as dist
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    ).save_pretrained(folder)  # fmt: skip
    model = UNet2DModel.from_pretrained(folder)
model.train()
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
dataset = torch.rand(160, 1, 8, 8).round() * 2 - 1
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, len(loader))
parallel = mdcs.parallelize(model, optimizer)  # was: model = DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
losses: list[float] = []
for clean_images in loader:
    noise = torch.randn(clean_images.shape)
    timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean_images),), dtype=torch.int64)
    noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
    noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
    loss = F.mse_loss(noise_pred, noise)
    loss.backward()
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
    losses.append(loss.item())
dist.destroy_process_group()
