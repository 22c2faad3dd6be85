"""pytorch/examples' vae: summed losses, noise inside of the model, and samples by one of its parts between epochs."""

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 40)
        self.fc21 = nn.Linear(40, 5)
        self.fc22 = nn.Linear(40, 5)
        self.fc3 = nn.Linear(5, 40)
        self.fc4 = nn.Linear(40, 784)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        return mu + torch.randn_like(std) * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, 784))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


dist.init_process_group("gloo")
torch.manual_seed(1)
images = torch.rand(96, 1, 28, 28).round()
train_loader = DataLoader(images[:80], batch_size=4, sampler=DistributedSampler(images[:80]))
test_loader = DataLoader(images[80:], batch_size=4, sampler=DistributedSampler(images[80:], shuffle=False))
model = VAE()
optimizer = optim.Adam(model.parameters(), lr=1e-3)
parallel = mdcs.parallelize(model, optimizer, budget="80%")  # was: model = DistributedDataParallel(model)
losses: list[float] = []


def train() -> None:
    model.train()
    for data in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()


def test() -> None:
    model.eval()
    with torch.no_grad():
        for data in test_loader:
            losses.append(loss_function(model(data)[0], data, *model(data)[1:]).item())


for _ in range(3):
    train()
    test()
    with torch.no_grad():
        sample = torch.randn(8, 5)
        sample = model.decode(sample)  # was: sample = model.module.decode(sample)
        losses.append(float(sample.double().sum()))
dist.destroy_process_group()
