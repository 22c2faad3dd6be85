"""pytorch/examples' dcgan: two passes of the discriminator in a step, and the generator's loss through it."""

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, DistributedSampler

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel

nz, ngf, ndf, nc = 8, 4, 4, 1


def weights_init(m: nn.Module) -> None:
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 4, 1, 0, bias=False), nn.BatchNorm2d(ngf * 2), nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False), nn.BatchNorm2d(ngf), nn.ReLU(True),
            nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(ndf * 2), nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
        )  # fmt: skip

    def forward(self, input: Tensor) -> Tensor:
        return self.main(input).view(-1, 1).squeeze(1)


dist.init_process_group("gloo")
torch.manual_seed(999)
images = torch.rand(168, nc, 16, 16).round() * 2 - 1
dataloader = DataLoader(images, batch_size=4, sampler=DistributedSampler(images))
netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, nz, 1, 1)
optimizerD = optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
parallelD = mdcs.parallelize(netD, optimizerD)  # was: netD = DistributedDataParallel(netD)
parallelG = mdcs.parallelize(netG, optimizerG)  # was: netG = DistributedDataParallel(netG)
torch.manual_seed(dist.get_rank())
losses: list[float] = []
for real in dataloader:
    netD.zero_grad()
    label = torch.full((len(real),), 1.0)
    output = netD(real)
    errD_real = criterion(output, label)
    errD_real.backward()
    fake = netG(torch.randn(len(real), nz, 1, 1))
    label.fill_(0.0)
    output = netD(fake.detach())
    errD_fake = criterion(output, label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1.0)
    with parallelD.no_sync():  # new
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
    optimizerG.step()
    losses += [errD_real.item() + errD_fake.item(), errG.item()]
with torch.no_grad():
    losses.append(netG(fixed_noise).double().sum().item())
dist.destroy_process_group()
