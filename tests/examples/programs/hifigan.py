"""HiFi-GAN: weight norm, a discriminator with spectral norm, whose forward changes its buffers, and two optimizers."""

import itertools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import spectral_norm, weight_norm

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class ResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(weight_norm(nn.Conv1d(channels, channels, 3, 1, d, d)) for d in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        for c in self.convs:
            x = c(F.leaky_relu(x, 0.1)) + x
        return x


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_pre = weight_norm(nn.Conv1d(8, 16, 7, 1, 3))
        self.ups = nn.ModuleList(weight_norm(nn.ConvTranspose1d(16 >> i, 8 >> i, 4, 2, 1)) for i in range(2))
        self.resblocks = nn.ModuleList(ResBlock(8 >> i) for i in range(2))
        self.conv_post = weight_norm(nn.Conv1d(4, 1, 7, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for up, block in zip(self.ups, self.resblocks, strict=True):
            x = block(up(F.leaky_relu(x, 0.1)))
        return torch.tanh(self.conv_post(F.leaky_relu(x)))


class MultiScaleDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.discriminators = nn.ModuleList(
            nn.ModuleList([norm(nn.Conv1d(1, 8, 5, 2, 2)), norm(nn.Conv1d(8, 8, 5, 2, 2)), norm(nn.Conv1d(8, 1, 3, 1, 1))])
            for norm in (spectral_norm, weight_norm)
        )

    def forward(self, y: Tensor, y_hat: Tensor) -> list[list[list[Tensor]]]:
        return [[self.maps(d, x) for x in (y, y_hat)] for d in self.discriminators]

    def maps(self, convs: nn.ModuleList, x: Tensor) -> list[Tensor]:
        return list(itertools.accumulate(convs, lambda h, conv: F.leaky_relu(conv(h), 0.1), initial=x))[1:]


dist.init_process_group("gloo")
torch.manual_seed(1234)
generator, msd = Generator(), MultiScaleDiscriminator()
optim_g = torch.optim.AdamW(generator.parameters(), 0.0002, betas=(0.8, 0.99))
optim_d = torch.optim.AdamW(msd.parameters(), 0.0002, betas=(0.8, 0.99))
schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.999) for o in (optim_g, optim_d)]
parallel_g = mdcs.parallelize(generator, optim_g)  # was: generator = DistributedDataParallel(generator)
parallel_d = mdcs.parallelize(msd, optim_d, broadcast_buffers=True)  # was: msd = DistributedDataParallel(msd)
torch.manual_seed(dist.get_rank())
losses: list[float] = []
for _ in range(12):
    x, y = torch.randn(4, 8, 16), torch.randn(4, 1, 64).cumsum(2).sin()
    y_g_hat = generator(x)
    optim_d.zero_grad()
    loss_disc = sum(((1 - real[-1]) ** 2).mean() + (fake[-1] ** 2).mean() for real, fake in msd(y, y_g_hat.detach()))
    loss_disc.backward()
    optim_d.step()
    optim_g.zero_grad()
    with parallel_d.no_sync():  # new
        loss_gen = 45 * F.l1_loss(y_g_hat, y)
        for real, fake in msd(y, y_g_hat):
            loss_gen = loss_gen + ((1 - fake[-1]) ** 2).mean() + 2 * sum(F.l1_loss(a, b) for a, b in zip(fake, real, strict=True))
        loss_gen.backward()
    optim_g.step()
    for scheduler in schedulers:
        scheduler.step()
    losses += [loss_disc.item(), loss_gen.item()]
dist.destroy_process_group()
