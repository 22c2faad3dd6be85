"""pytorch/examples' imagenet: a ResNet by SGD, its best weights saved, and training goes on from the file."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import ResNetConfig, ResNetForImageClassification

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
config = ResNetConfig(num_channels=3, embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5)
model = ResNetForImageClassification(config)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
parallel = mdcs.parallelize(model, optimizer, budget="floor+5%")  # was: model = DistributedDataParallel(model)

target = torch.randint(5, (64,))
images = torch.randn(64, 3, 32, 32) + target[:, None, None, None] / 4
train_sampler = DistributedSampler(TensorDataset(images[:48], target[:48]))
train_loader = DataLoader(train_sampler.dataset, batch_size=3, sampler=train_sampler)
val_sampler = DistributedSampler(TensorDataset(images[48:], target[48:]), shuffle=False, drop_last=True)
val_loader = DataLoader(val_sampler.dataset, batch_size=4, sampler=val_sampler)
losses: list[float] = []


def train() -> None:
    model.train()
    for images, target in train_loader:
        loss = criterion(model(images).logits, target)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate() -> float:
    model.eval()
    correct = torch.zeros(())
    with parallel.evaluate():  # was: with torch.no_grad():
        for images, target in val_loader:
            output = model(images).logits
            losses.append(criterion(output, target).item())
            correct += (output.argmax(1) == target).sum()
    dist.all_reduce(correct)
    return correct.item()


best_acc1, saved = -1.0, Path(tempfile.mkdtemp()) / "checkpoint.pth.tar"
for epoch in range(3):
    train_sampler.set_epoch(epoch)
    train()
    acc1 = validate()
    scheduler.step()
    best_acc1 = max(acc1, best_acc1)
    whole, moments = parallel.state_dict(), optimizer.state_dict()  # new
    if dist.get_rank() == 0:
        checkpoint = {"epoch": epoch + 1, "best_acc1": best_acc1, "scheduler": scheduler.state_dict()}
        checkpoint["state_dict"] = whole  # was: checkpoint["state_dict"] = model.module.state_dict()
        checkpoint["optimizer"] = moments  # was: checkpoint["optimizer"] = optimizer.state_dict()
        torch.save(checkpoint, saved)
        losses += [best_acc1, *(float(v.double().sum()) for v in torch.load(saved)["state_dict"].values())]
dist.destroy_process_group()
