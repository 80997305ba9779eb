"""Vision: the convolutional network, the autoencoder and the GAN of PyTorch's examples, and MoCo."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.idioms import Loop
from tests.behaviour.training_functions.base import loop, training


class ConvNet(nn.Module):
    """Of the MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 2, 3, 1), nn.Conv2d(2, 3, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(12, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def image_loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(12, 1, 8, 8), torch.randint(4, (12,))), batch_size=4, shuffle=True)


@training()
def mnist() -> Loop:
    """A whole epoch is the compiled function: it iterates over the loader, and prints at every interval."""
    args = SimpleNamespace(log_interval=2, dry_run=False)
    model, device, train_loader = ConvNet(), torch.device("cpu"), image_loader()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def train(args: Any, model: Any, device: Any, train_loader: Any, optimizer: Any, epoch: int) -> None:
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % args.log_interval == 0:
                percent = 100.0 * batch_idx / len(train_loader)
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)} ({percent:.0f}%)]\tLoss: {loss.item():.6f}")
                if args.dry_run:
                    break

    def arguments(call: int) -> tuple[Any, ...]:
        if call:
            scheduler.step()
        return args, model, device, train_loader, optimizer, call

    return Loop(step=train, arguments=arguments, observe=lambda: {"model": model, "opt": optimizer})


class VAE(nn.Module):
    """Of the VAE example."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.fc3, self.fc4 = nn.Linear(2, 6), nn.Linear(6, 64)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h1 = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h1), self.fc22(h1)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar))))), mu, logvar


@training()
def vae() -> Loop:
    """A whole epoch again, with `train_loss += loss.item()` for every batch."""
    model, train_loader, log_interval = VAE(), image_loader(), 2
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
        BCE = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
        KLD = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
        return BCE + KLD

    def train(epoch: int) -> None:
        model.train()
        train_loss = 0
        for batch_idx, (data, _) in enumerate(train_loader):
            data = data.sigmoid()
            optimizer.zero_grad()
            recon_batch, mu, logvar = model(data)
            loss = loss_function(recon_batch, data, mu, logvar)
            loss.backward()
            train_loss += loss.item()
            optimizer.step()
            if batch_idx % log_interval == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}]\tLoss: {loss.item() / len(data):.6f}")
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_loader.dataset):.4f}")

    return loop(train, lambda call: (call,), model=model, opt=optimizer)


@training()
def dcgan() -> Loop:
    """Two networks, two optimizers, three backwards, a label that is filled in place, samples kept every third call."""
    netG = nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4, 1, 0, bias=False), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.ConvTranspose2d(4, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip
    netD = nn.Sequential(
        nn.Conv2d(1, 4, 4, 2, 1, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(4, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0),
    )  # fmt: skip
    criterion, fixed_noise, real_label, fake_label = nn.BCELoss(), torch.randn(2, 5, 1, 1), 1, 0
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-2, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-2, betas=(0.5, 0.999))
    images: list[Tensor] = []

    def step(i: int, data: tuple[Tensor, Tensor]) -> None:
        netD.zero_grad()
        real_cpu = data[0]
        batch_size = real_cpu.size(0)
        label = torch.full((batch_size,), real_label, dtype=real_cpu.dtype)
        output = netD(real_cpu)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean().item()
        noise = torch.randn(batch_size, 5, 1, 1)
        fake = netG(noise)
        label.fill_(fake_label)
        output = netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean().item()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(real_label)
        output = netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean().item()
        optimizerG.step()
        print(f"[{i}] Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")
        print(f"D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f} / {D_G_z2:.4f}")
        if i % 3 == 0:
            images.append(netG(fixed_noise).detach())

    def arguments(call: int) -> tuple[int, tuple[Tensor, Tensor]]:
        draw = torch.Generator().manual_seed(call)
        return call, (torch.randn(3, 1, 8, 8, generator=draw), torch.zeros(3))

    return loop(step, arguments, netD=netD, netG=netG, optD=optimizerD, optG=optimizerG, images=images)


class MoCo(nn.Module):
    """Two encoders, one of which follows the other, and a queue of keys with a pointer."""

    queue: Tensor
    queue_ptr: Tensor

    def __init__(self, K: int = 12, m: float = 0.99, T: float = 0.07) -> None:
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = nn.Linear(6, 4), nn.Linear(6, 4)
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data.copy_(param_q.data)
            param_k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(4, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        ptr = (ptr + batch_size) % self.K
        self.queue_ptr[0] = ptr

    def forward(self, im_q: Tensor, im_k: Tensor) -> tuple[Tensor, Tensor]:
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            idx_shuffle = torch.randperm(im_k.shape[0])
            k = nn.functional.normalize(self.encoder_k(im_k[idx_shuffle]), dim=1)[torch.argsort(idx_shuffle)]
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long)
        self._dequeue_and_enqueue(k)
        return logits, labels


@training()
def moco() -> Loop:
    """A contrastive step with its accuracies."""
    model, criterion = MoCo(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
    sums = {"loss": 0.0, "top1": 0.0, "count": 0}

    def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
        with torch.no_grad():
            _, pred = output.topk(max(topk), 1, True, True)
            correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
            return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]

    def step(im_q: Tensor, im_k: Tensor) -> float:
        output, target = model(im_q=im_q, im_k=im_k)
        loss = criterion(output, target)
        acc1, _ = accuracy(output, target, topk=(1, 5))
        sums["loss"] += loss.item() * im_q.size(0)
        sums["top1"] += acc1[0].item() * im_q.size(0)
        sums["count"] += im_q.size(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return sums["loss"] / sums["count"]

    def arguments(call: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(call)
        return torch.randn(4, 6, generator=draw), torch.randn(4, 6, generator=draw)

    return loop(step, arguments, model=model, opt=optimizer, sums=sums)
