"""pytorch/examples' siamese network: one ResNet for two images, activations in place, Adadelta."""

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mdcs  # was: from torch.nn.parallel import DistributedDataParallel


class BasicBlock(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))
        self.downsample = shortcut if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = nn.Conv2d(1, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        layers = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8)), nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.resnet = nn.Sequential(*stem, *layers, nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Sequential(nn.Linear(2 * 16, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()
        self.apply(self.init_weights)

    def init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x: Tensor) -> Tensor:
        output = self.resnet(x)
        return output.view(output.size()[0], -1)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        output = torch.cat((self.forward_once(input1), self.forward_once(input2)), 1)
        return self.sigmoid(self.fc(output))


dist.init_process_group("gloo")
torch.manual_seed(1)
pairs = TensorDataset(torch.randn(64, 1, 28, 28), torch.randn(64, 1, 28, 28), torch.randint(2, (64,)).float())
train_loader = DataLoader(pairs, batch_size=4, sampler=DistributedSampler(pairs))
test_loader = DataLoader(pairs, batch_size=8, sampler=DistributedSampler(pairs, shuffle=False))
model = SiameseNetwork()
optimizer = optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
parallel = mdcs.parallelize(model, optimizer, budget="floor+5%")  # was: model = DistributedDataParallel(model)
criterion = nn.BCELoss()
losses: list[float] = []
for _ in range(3):
    model.train()
    for images_1, images_2, targets in train_loader:
        optimizer.zero_grad()
        outputs = model(images_1, images_2).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with parallel.evaluate():  # was: with torch.no_grad():
        for images_1, images_2, targets in test_loader:
            losses.append(criterion(model(images_1, images_2).squeeze(), targets).item())
    scheduler.step()
weights = parallel.state_dict()  # was: weights = model.state_dict()
losses += [float(v.double().sum()) for v in weights.values()]
dist.destroy_process_group()
