"""A VQ-VAE: the codebook is made of buffers, which every forward moves on (a moving average), as rank 0's batch says."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class Quantize(nn.Module):
    def __init__(self, dim: int, n_embed: int, decay: float = 0.99, eps: float = 1e-5) -> None:
        super().__init__()
        self.dim, self.n_embed, self.decay, self.eps = dim, n_embed, decay, eps
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        flatten = input.reshape(-1, self.dim)
        distance = flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        embed_ind = distance.argmin(1)
        embed_onehot = F.one_hot(embed_ind, self.n_embed).type(flatten.dtype)
        quantize = F.embedding(embed_ind.view(*input.shape[:-1]), self.embed.t())
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(embed_onehot.sum(0), alpha=1 - self.decay)
            self.embed_avg.data.mul_(self.decay).add_(flatten.detach().t() @ embed_onehot, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - input).pow(2).mean()
        return input + (quantize - input).detach(), diff


class VQVAE(nn.Module):
    def __init__(self, channel: int = 16, embed_dim: int = 8, n_embed: int = 16) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, channel, 4, 2, 1), nn.ReLU(), nn.Conv2d(channel, channel, 3, 1, 1))
        self.quantize_conv, self.quantize = nn.Conv2d(channel, embed_dim, 1), Quantize(embed_dim, n_embed)
        self.dec = nn.Sequential(nn.Conv2d(embed_dim, channel, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(channel, 3, 4, 2, 1))

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        quant, diff = self.quantize(self.quantize_conv(self.enc(input)).permute(0, 2, 3, 1))
        return self.dec(quant.permute(0, 3, 1, 2)), diff.unsqueeze(0)


dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = torch.rand(160, 3, 8, 8)
loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset))
model = VQVAE()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
parallel = mdcs.parallelize(model, optimizer, broadcast_buffers=True)  # was: model = DistributedDataParallel(model)
losses: list[float] = []
for img in loader:
    model.zero_grad()
    out, latent_loss = model(img)
    recon_loss = F.mse_loss(out, img)
    loss = recon_loss + 0.25 * latent_loss.mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
dist.destroy_process_group()
