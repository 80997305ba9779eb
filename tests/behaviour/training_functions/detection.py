"""Detection: losses in a dict over lists of images and target dicts, as torchvision and DETR train."""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict, deque
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.idioms import Loop
from tests.behaviour.training_functions.base import loop, training


def box_area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_iou(one: Tensor, other: Tensor) -> Tensor:
    lt, rb = torch.max(one[:, None, :2], other[:, :2]), torch.min(one[:, None, 2:], other[:, 2:])
    inter = (rb - lt).clamp(min=0).prod(2)
    return inter / (box_area(one)[:, None] + box_area(other) - inter)


class Detector(nn.Module):
    """Images of several sizes in a list, anchors, chance samples, a dict of losses: as the detectors of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.ReLU())
        self.cls_logits, self.bbox_pred = nn.Conv2d(4, 1, 1), nn.Conv2d(4, 4, 1)

    def batched(self, images: list[Tensor]) -> Tensor:
        height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
        batch = images[0].new_full((len(images), 3, height, width), 0)
        for i in range(batch.shape[0]):
            img = images[i]
            batch[i, :, : img.shape[1], : img.shape[2]].copy_(img)
        return batch

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        for target_idx, target in enumerate(targets):
            degenerate = target["boxes"][:, 2:] <= target["boxes"][:, :2]
            if degenerate.any():
                raise ValueError(
                    f"All bounding boxes should have positive height and width; target {target_idx} has not."
                )
        features = self.backbone(self.batched(images))
        h, w = features.shape[-2:]
        ys, xs = torch.meshgrid(torch.arange(h) * 4.0, torch.arange(w) * 4.0, indexing="ij")
        anchors = torch.stack([xs, ys, xs + 6, ys + 6], -1).reshape(-1, 4)
        logits = self.cls_logits(features).flatten(1)
        deltas = self.bbox_pred(features).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
        labels, regressions, sampled, positives = [], [], [], []
        for image, target in enumerate(targets):
            iou, matched = box_iou(target["boxes"], anchors).max(dim=0)
            label = (iou > 0.1).float()
            positive, negative = torch.where(label >= 1)[0], torch.where(label == 0)[0]
            num_pos = min(positive.numel(), 3)
            pos = positive[torch.randperm(positive.numel())[:num_pos]]
            neg = negative[torch.randperm(negative.numel())[: 6 - num_pos]]
            labels.append(label)
            regressions.append((target["boxes"][matched] - anchors) / 6)
            sampled.append(torch.cat([pos, neg]) + image * len(anchors))
            positives.append(pos + image * len(anchors))
        chosen, pos = torch.cat(sampled), torch.cat(positives)
        loss_box = F.smooth_l1_loss(
            deltas.reshape(-1, 4)[pos], torch.cat(regressions)[pos], beta=1 / 9, reduction="sum"
        )
        return {
            "loss_objectness": F.binary_cross_entropy_with_logits(logits.flatten()[chosen], torch.cat(labels)[chosen]),
            "loss_rpn_box_reg": loss_box / chosen.numel(),
        }


def images_and_targets(call: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    draw = torch.Generator().manual_seed(call)
    images, targets = [], []
    for number in range(2):
        count = 1 + (call + number) % 3
        corner = torch.rand(count, 2, generator=draw) * 8
        images.append(torch.rand(3, 16, 12 + 4 * number, generator=draw))
        boxes = torch.cat([corner, corner + 3 + 4 * torch.rand(count, 2, generator=draw)], 1)
        targets.append({"boxes": boxes, "labels": torch.randint(3, (count,), generator=draw)})
    return images, targets


class SmoothedValue:
    """Tracks a series of values, over a window and the whole."""

    def __init__(self) -> None:
        self.deque: deque[float] = deque(maxlen=3)
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.deque.append(value)
        self.count += 1
        self.total += value

    @property
    def median(self) -> float:
        return torch.tensor(list(self.deque)).median().item()


@training()
def detection() -> Loop:
    """Lists of images and of dicts, a dict of losses, a warm-up schedule, meters, an exit if a loss is not finite."""
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    meters: dict[str, SmoothedValue] = defaultdict(SmoothedValue)

    def train_one_batch(images: Any, targets: Any) -> None:
        images = list(image.to("cpu") for image in images)  # noqa: C400
        targets = [{k: v.to("cpu") if isinstance(v, Tensor) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        lr_scheduler.step()
        for k, v in {"loss": losses, **loss_dict}.items():
            meters[k].update(v.item())
        print("  ".join(f"{name}: {meter.median:.4f}" for name, meter in meters.items()))

    def observed() -> dict[str, Any]:
        return {k: (list(v.deque), v.total, v.count) for k, v in meters.items()}

    return loop(train_one_batch, images_and_targets, model=model, opt=optimizer, meters=observed)


class SetDetector(nn.Module):
    """Queries that attend to an image, each a box and a class."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.query = nn.Conv2d(3, 8, 4, 4), nn.Embedding(4, 8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, dropout=0.1, batch_first=True)
        self.class_embed, self.bbox_embed = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        source = self.backbone(x).flatten(2).transpose(1, 2)
        hidden = self.transformer(source, self.query.weight.unsqueeze(0).repeat(len(x), 1, 1))
        return {"pred_logits": self.class_embed(hidden), "pred_boxes": self.bbox_embed(hidden).sigmoid()}


def assignment(cost: Any) -> tuple[Any, Any]:
    """The cheapest way to give each column a row of its own; all are tried."""
    rows = min(
        itertools.permutations(range(cost.shape[0]), cost.shape[1]), key=lambda way: cost[way, range(len(way))].sum()
    )
    order = np.argsort(rows)
    return np.array(rows)[order], np.arange(cost.shape[1])[order]


@training()
def hungarian_matching() -> Loop:
    """As DETR: a matcher that assigns boxes in numpy, between the forward and losses in a dict."""
    model, weight_dict = SetDetector(), {"loss_ce": 1.0, "loss_bbox": 5.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history: list[dict[str, float]] = []

    @torch.no_grad()
    def matcher(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        bs, num_queries = outputs["pred_logits"].shape[:2]
        out_prob = outputs["pred_logits"].flatten(0, 1).softmax(-1)
        tgt_ids, tgt_bbox = torch.cat([v["labels"] for v in targets]), torch.cat([v["boxes"] for v in targets])
        C = 5 * torch.cdist(outputs["pred_boxes"].flatten(0, 1), tgt_bbox, p=1) - out_prob[:, tgt_ids]
        C = C.view(bs, num_queries, -1).cpu()
        sizes = [len(v["boxes"]) for v in targets]
        indices = [assignment(c[i].numpy()) for i, c in enumerate(C.split(sizes, -1))]
        return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in indices]

    def criterion(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        indices = matcher({k: v for k, v in outputs.items()}, targets)  # noqa: C416
        num_boxes = torch.clamp(
            torch.as_tensor([sum(len(t["labels"]) for t in targets)], dtype=torch.float), min=1
        ).item()
        idx = (
            torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)]),
            torch.cat([src for src, _ in indices]),
        )
        target_classes = torch.full(outputs["pred_logits"].shape[:2], 3, dtype=torch.int64)
        target_classes[idx] = torch.cat([t["labels"][J] for t, (_, J) in zip(targets, indices, strict=True)])
        target_boxes = torch.cat([t["boxes"][J] for t, (_, J) in zip(targets, indices, strict=True)])
        loss_bbox = F.l1_loss(outputs["pred_boxes"][idx], target_boxes, reduction="none").sum() / num_boxes
        return {
            "loss_ce": F.cross_entropy(outputs["pred_logits"].transpose(1, 2), target_classes),
            "loss_bbox": loss_bbox,
        }

    def step(samples: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        loss_dict = criterion(model(samples), targets)
        losses = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
        reduced = {k: v.item() for k, v in loss_dict.items()}
        if not math.isfinite(sum(reduced.values())):
            raise SystemExit(1)
        optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        history.append(reduced)
        return losses.detach()

    def arguments(call: int) -> tuple[Tensor, list[dict[str, Tensor]]]:
        _, targets = images_and_targets(call)
        samples = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(call))
        return samples, [{"labels": t["labels"], "boxes": t["boxes"] / 16} for t in targets]

    return loop(step, arguments, model=model, opt=optimizer, history=history)
