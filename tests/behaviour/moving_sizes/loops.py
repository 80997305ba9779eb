"""Training loops over batches of random sizes, each as a case: text, images, graphs, masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run

LOOPS = Registry()
CALLS = 30
WORDS, WIDTH, CLASSES = 31, 16, 5
F = nn.functional


def batches(run: Run, make: Callable[[random.Random, torch.Generator], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Batches of other sizes on each rank and in each call."""
    sizes, numbers = random.Random(run.rank + 1), torch.Generator().manual_seed(run.rank + 1)
    return [make(sizes, numbers) for _ in range(getattr(run, "calls", CALLS))]


def words(numbers: torch.Generator, *shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape, generator=numbers)


class Transformer(nn.Module):
    """A block that attends, and a head."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head, self.causal = nn.Linear(WIDTH, WORDS), causal

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """`x`: [batch, length] of words; `padding`: the same, True where there is none."""
        length = x.shape[1]
        h = self.words(x) + self.places(torch.arange(length))
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1) if self.causal else None
        out: Tensor = self.head(self.block(h, src_mask=mask, src_key_padding_mask=padding))
        return out


def training(run: Run, module: nn.Module, loss_of: Callable[..., Tensor], data: list[tuple[Any, ...]]) -> Job:
    """Forward, loss, backward, clipping and an optimizer as one step: Adam, or the one that `run` names."""
    model, optimizer = run.model(module), getattr(run, "optimizer", torch.optim.AdamW)
    opt = optimizer(module.parameters(), lr=1e-2)

    @run.compile
    def step(*batch: Any) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Job(step=step, batches=data, objects={"module": module, "opt": opt})


@LOOPS.add(traces=(2, 3))
def lengths(run: Any) -> Job:
    def loss(model: Any, x: Tensor) -> Tensor:
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    data = batches(run, lambda sizes, numbers: (words(numbers, 4, sizes.randint(3, 40)),))
    return training(run, Transformer(), loss, data)


@LOOPS.add(traces=(2, 3))
def slices_of_a_batch(run: Any) -> Job:
    """Arguments whose strides no sizes of theirs give: each is a slice of a larger tensor."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1))

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        length, start = sizes.randint(3, 40), sizes.randint(1, 4)
        tokens = words(numbers, 4, length + 4)
        return tokens[:, :length], tokens[:, start : start + length]

    return training(run, Transformer(), loss, batches(run, batch))


@LOOPS.add(traces=(2, 3))
def lengths_far_apart(run: Any) -> Job:
    """Ranks predict other costs, and follow one plan."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    bounds = (2, 5) if run.rank == 0 else (50, 60)
    data = batches(run, lambda sizes, numbers: (words(numbers, 4, sizes.randint(*bounds)),) * 2)
    return training(run, Transformer(), loss, data)


@LOOPS.add(traces=(2, 3, 4, 5))
def batches_and_lengths(run: Any) -> Job:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = sizes.randint(1, 6), sizes.randint(1, 40)
        return words(numbers, *shape), words(numbers, *shape)

    return training(run, Transformer(), loss, batches(run, batch))


@LOOPS.add(traces=(2, 3))
def padding_masks(run: Any) -> Job:
    def loss(model: Any, x: Tensor, y: Tensor, length: Tensor) -> Tensor:
        padding = torch.arange(x.shape[1])[None, :] >= length[:, None]
        logits = model(x, padding)
        each = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
        return each.masked_fill(padding, 0.0).sum() / length.sum()

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
        longest = sizes.randint(4, 40)
        length = torch.tensor([longest, *(sizes.randint(1, longest) for _ in range(3))])
        return words(numbers, 4, longest), words(numbers, 4, longest), length

    return training(run, Transformer(causal=False), loss, batches(run, batch))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


@LOOPS.add(traces=(2, 3, 4, 5))
def image_sizes(run: Any) -> Job:
    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        count, height, width = sizes.randint(2, 5), sizes.randint(8, 24), sizes.randint(8, 24)
        image = torch.randn(count, 3, height, width, generator=numbers)
        return image, torch.randint(CLASSES, (count,), generator=numbers)

    return training(run, convolutions(), lambda model, x, y: F.cross_entropy(model(x), y), batches(run, batch))


class GraphNet(nn.Module):
    """Two rounds of messages along edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """`x`: [nodes, WIDTH]; `edges`: [2, edges], of nodes."""
        for layer in self.layers:
            incoming = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = layer(torch.cat([x, incoming], dim=1)).relu()
        out: Tensor = self.head(x)
        return out


def graph(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
    nodes, edges = sizes.randint(5, 30), sizes.randint(6, 60)
    return (
        torch.randn(nodes, WIDTH, generator=numbers), torch.randint(nodes, (2, edges), generator=numbers),
        torch.randint(CLASSES, (nodes,), generator=numbers), torch.rand(nodes, generator=numbers) < 0.6,
    )  # fmt: skip


@LOOPS.add(traces=(2, 3))
def graphs_with_weights(run: Any) -> Job:
    """A mask of nodes that weighs their losses."""

    def loss(model: Any, x: Tensor, edges: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        each = F.cross_entropy(model(x, edges), y, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)

    return training(run, GraphNet(), loss, batches(run, graph))


@LOOPS.add(traces=(2, 3))
def boolean_mask_in_the_loss(run: Any) -> Job:
    """Places without a word are left out, of which every batch has another number."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        mask = y != 1
        return F.cross_entropy(model(x)[mask], y[mask])

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        length = sizes.randint(3, 40)
        return words(numbers, 4, length), words(numbers, 4, length) % 3

    return training(run, Transformer(), loss, batches(run, batch))


@LOOPS.add(traces=(2, 3))
def nonzero_and_gather(run: Any) -> Job:
    """The masked words alone go through the head."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        places = (y.flatten() > WORDS // 2).nonzero().squeeze(1)
        logits = model(x).flatten(0, 1).index_select(0, places)
        return F.cross_entropy(logits, y.flatten()[places], reduction="sum") / y.numel()

    data = batches(run, lambda sizes, numbers: (words(numbers, 4, sizes.randint(3, 40)),) * 2)
    return training(run, Transformer(), loss, data)


@LOOPS.add(traces=(2, 3))
def graphs_with_train_masks(run: Any) -> Job:
    def loss(model: Any, x: Tensor, edges: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return F.cross_entropy(model(x, edges)[mask], y[mask])

    return training(run, GraphNet(), loss, batches(run, graph))


class Speech(nn.Module):
    """Frames to log-probabilities of words."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WORDS))

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, frames, 8]."""
        out: Tensor = self.layers(x).log_softmax(-1).transpose(0, 1)
        return out


@LOOPS.add(traces=(2, 3))
def ctc(run: Any) -> Job:
    def loss(model: Any, x: Tensor, y: Tensor, frames: Tensor, length: Tensor) -> Tensor:
        return F.ctc_loss(model(x), y, frames, length, zero_infinity=True)

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
        frames, longest = sizes.randint(20, 40), sizes.randint(4, 9)
        length = torch.tensor([longest, *(sizes.randint(2, longest) for _ in range(3))])
        heard = torch.tensor([frames, *(sizes.randint(20, frames) for _ in range(3))])
        return torch.randn(4, frames, 8, generator=numbers), words(numbers, 4, longest), heard, length

    return training(run, Speech(), loss, batches(run, batch))


class Detector(nn.Module):
    """Boxes and classes for each place of a grid of 4 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.ReLU(),
        )  # fmt: skip
        self.boxes, self.classes = nn.Conv2d(8, 4, 1), nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`x`: [batch, 3, height, width]. Gives [batch, places, 4] and [batch, places, CLASSES]."""
        h = self.body(x)
        return self.boxes(h).flatten(2).transpose(1, 2), self.classes(h).flatten(2).transpose(1, 2)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Areas that boxes [n, 4] and [m, 4] share, over those that they cover: [n, m]."""
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    areas = [(one[:, 2:] - one[:, :2]).prod(-1) for one in (a, b)]
    return shared / (areas[0][:, None] + areas[1][None] - shared)


@LOOPS.add(traces=(2, 3))
def detection_with_ragged_targets(run: Any) -> Job:
    """Each image has boxes of its own, and each place of the grid learns the one that it lies in most."""

    def places(height: int, width: int) -> Tensor:
        rows, columns = torch.arange(height // 4) * 4.0, torch.arange(width // 4) * 4.0
        corner = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).view(-1, 2)
        return torch.cat([corner - 2, corner + 6], 1)

    def loss(model: Any, images: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        boxes, classes = model(images)
        grid = places(images.shape[2], images.shape[3])
        losses = []
        for box, logits, target in zip(boxes, classes, targets, strict=True):
            best, which = overlaps(grid, target["boxes"]).max(1)
            near = best > 0.2
            wanted = torch.where(near, target["labels"][which], 0)
            off = box[near] + grid[near] - target["boxes"][which][near]
            losses.append(F.cross_entropy(logits, wanted) + off.abs().sum() / near.sum().clamp(min=1))
        return torch.stack(losses).mean()

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Any, ...]:
        height, width = 4 * sizes.randint(3, 8), 4 * sizes.randint(3, 8)
        targets = []
        for _ in range(2):
            count = sizes.randint(2, 9)
            corner = torch.rand(count, 2, generator=numbers) * 8
            boxes = torch.cat([corner, corner + 4 + torch.rand(count, 2, generator=numbers) * 8], 1)
            targets.append({"boxes": boxes, "labels": torch.randint(1, CLASSES, (count,), generator=numbers)})
        return torch.randn(2, 3, height, width, generator=numbers), targets

    return training(run, Detector(), loss, batches(run, batch))


@LOOPS.add(live=True, traces=())
def branch_on_data(run: Any) -> Job:
    """Long losses are clipped, which Python decides."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        return found.sqrt() if found > 3.4 else found

    data = batches(run, lambda sizes, numbers: (words(numbers, 4, sizes.randint(3, 40)),) * 2)
    return training(run, Transformer(), loss, data)


@LOOPS.add(live=True, traces=(), ranks=False)  # ranks that leave a step out while others do not are a hang in DDP
def nothing_left(run: Any) -> Job:
    """A batch in which every place is masked out makes no step."""
    module = Transformer()
    model, opt = run.model(module), torch.optim.AdamW(module.parameters(), lr=1e-2)

    @run.compile
    def step(x: Tensor, keep: Tensor) -> Tensor | None:
        if not keep.any():
            return None
        loss = F.cross_entropy(model(x)[keep], x[keep])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    def batch(sizes: random.Random, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
        x = words(numbers, 4, sizes.randint(3, 40))
        return x, x > (WORDS if sizes.random() < 0.2 else 3)

    return Job(step=step, batches=batches(run, batch), objects={"module": module, "opt": opt})
