"""Shapes that are data: masks, unique values, packed sequences, CTC, ragged targets, lists of lengths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from benchmarks.idioms.base import (
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    Loop,
    batch,
    generator,
    idiom,
    loop,
    mlp,
    sgd,
    small_training,
    update,
)


def sequences(call):
    """Padded sequences, their lengths in falling order, and a class per sequence."""
    draw = generator(call)
    lengths = torch.randint(1, 7, (4,), generator=draw).sort(descending=True).values
    return torch.randn(4, 6, FEATURES, generator=draw), lengths, torch.randint(CLASSES, (4,), generator=draw)


@idiom()
def boolean_mask() -> Loop:
    """Only rows that are marked count: `logits[mask]`."""
    model, opt = small_training()

    def step(x, y):
        mask = x[:, 0] > -0.5
        logits = model(x)
        return update(F.cross_entropy(logits[mask], y[mask], reduction="sum") / len(x), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def mask_of_predictions() -> Loop:
    """Pseudo labels: rows of which the model is sure."""
    model, opt = small_training()
    counts = []

    def step(x, y):
        logits = model(x)
        sure = logits.softmax(1).max(1).values > 0.45
        counts.append(int(sure.sum()))
        loss = F.cross_entropy(logits, y)
        if counts[-1]:
            loss = loss + F.cross_entropy(logits[sure], logits[sure].argmax(1))
        return update(loss, opt)

    return loop(step, model=model, opt=opt, counts=counts)


@idiom()
def masked_select() -> Loop:
    """Positive targets alone, as one long vector."""
    model, opt = small_training()

    def step(x, y):
        targets = F.one_hot(y, CLASSES).bool() & (x[:, :1] > -1.0)
        return update(-torch.masked_select(model(x).log_softmax(1), targets).sum() / len(x), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def unique_classes() -> Loop:
    """A prototype per class that occurs, by `unique` and a mean over its rows."""
    model, opt = small_training()

    def step(x, y):
        z = model(x)
        classes, group = torch.unique(y, return_inverse=True)
        sums = torch.zeros(len(classes), z.size(1)).index_add(0, group, z)
        prototypes = sums / torch.bincount(group).unsqueeze(1)
        return update(F.cross_entropy(-torch.cdist(z, prototypes), group), opt), classes

    return loop(step, model=model, opt=opt)


@idiom()
def nonzero_indices() -> Loop:
    """Indices by `nonzero` and `torch.where`, and a gather by them."""
    model, opt = small_training()

    def step(x, y):
        logits = model(x)
        rows = (y != 0).nonzero().squeeze(1)
        others = torch.where(y == 0)[0]
        loss = F.cross_entropy(logits.index_select(0, rows), y[rows], reduction="sum")
        return update((loss + logits[others].pow(2).sum()) / len(x), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def packed_sequence() -> Loop:
    """A GRU over a packed batch; lengths are a tensor."""
    rnn, head = nn.GRU(FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)
    model = nn.ModuleList([rnn, head])
    opt = sgd(model)

    def step(x, lengths, y):
        _, last = rnn(pack_padded_sequence(x, lengths, batch_first=True))
        return update(F.cross_entropy(head(last[-1]), y), opt)

    return loop(step, sequences, model=model, opt=opt)


@idiom()
def packed_and_padded_again() -> Loop:
    """An LSTM whose outputs are padded again; lengths are a list of numbers."""
    rnn, head = nn.LSTM(FEATURES, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)
    model = nn.ModuleList([rnn, head])
    opt = sgd(model)

    def step(x, lengths, y):
        packed = pack_padded_sequence(x, lengths.tolist(), batch_first=True, enforce_sorted=False)
        outputs, found = pad_packed_sequence(rnn(packed)[0], batch_first=True)
        means = outputs.sum(1) / found.unsqueeze(1)
        return update(F.cross_entropy(head(means), y), opt)

    return loop(step, sequences, model=model, opt=opt)


def ctc_batch(call):
    """Frames, targets, lengths of both."""
    draw = generator(call)
    frames = torch.randn(8, 2, FEATURES, generator=draw)
    targets = torch.randint(1, CLASSES, (2, 3), generator=draw)
    return frames, targets, torch.randint(6, 9, (2,), generator=draw), torch.randint(1, 4, (2,), generator=draw)


@idiom()
def ctc_with_lengths_as_tensors() -> Loop:
    """`F.ctc_loss` reads lengths of frames and of targets on the host."""
    model, opt = small_training()

    def step(frames, targets, frame_lengths, target_lengths):
        scores = model(frames).log_softmax(2)
        return update(F.ctc_loss(scores, targets, frame_lengths, target_lengths, zero_infinity=True), opt)

    return loop(step, ctc_batch, model=model, opt=opt)


@idiom()
def ctc_with_lengths_as_lists() -> Loop:
    """The same with tuples of numbers, and targets in one row."""
    model, opt = small_training()
    loss_of = nn.CTCLoss(zero_infinity=True)

    def step(frames, targets, frame_lengths, target_lengths):
        flat = torch.cat([row[:length] for row, length in zip(targets, target_lengths, strict=True)])
        scores = model(frames).log_softmax(2)
        return update(loss_of(scores, flat, tuple(frame_lengths), tuple(target_lengths)), opt)

    def arguments(call):
        frames, targets, frame_lengths, target_lengths = ctc_batch(call)
        return frames, targets, frame_lengths.tolist(), target_lengths.tolist()

    return loop(step, arguments, model=model, opt=opt)


def detection_targets(call):
    """Images, and for each a dictionary of boxes and labels; one may have none."""
    draw = generator(call)
    targets = []
    for count in torch.randint(0, 4, (3,), generator=draw).tolist():
        boxes, labels = torch.rand(count, 4, generator=draw), torch.randint(CLASSES, (count,), generator=draw)
        targets.append({"boxes": boxes, "labels": labels})
    return list(torch.randn(3, FEATURES, generator=draw).unbind()), targets


@idiom()
def detection_with_ragged_targets() -> Loop:
    """torchvision's loop: lists of images and dictionaries in, a dictionary of losses summed and read."""
    model = nn.ModuleDict({"boxes": nn.Linear(FEATURES, 4), "labels": nn.Linear(FEATURES, CLASSES)})
    opt = sgd(model, lr=0.02)
    history = []

    def losses_of(images, targets):
        losses = {"boxes": torch.zeros(()), "labels": torch.zeros(())}
        for image, target in zip(images, targets, strict=True):
            if not len(target["labels"]):
                continue
            count = len(target["labels"])
            losses["boxes"] = losses["boxes"] + F.l1_loss(model["boxes"](image).expand(count, 4), target["boxes"])
            logits = model["labels"](image).expand(count, CLASSES)
            losses["labels"] = losses["labels"] + F.cross_entropy(logits, target["labels"])
        return losses

    def step(images, targets):
        targets = [{name: value.to("cpu") for name, value in target.items()} for target in targets]
        losses = losses_of(images, targets)
        total = sum(losses.values())
        if not torch.isfinite(total):
            raise FloatingPointError(str(losses))
        if total.requires_grad:
            update(total, opt)
        history.append({name: value.item() for name, value in losses.items()})

    return loop(step, detection_targets, model=model, opt=opt, history=history)


@idiom()
def mean_over_counted_tokens() -> Loop:
    """Padding is ignored, and the sum is divided by a number that Python has read."""
    model, opt = small_training()
    tokens = {"seen": 0}

    def step(x, y):
        y = torch.where(x[:, 0] > 0.8, -100, y)
        count = (y != -100).sum().item()
        tokens["seen"] += count
        loss = F.cross_entropy(model(x), y, ignore_index=-100, reduction="sum") / max(count, 1)
        return update(loss, opt)

    return loop(step, model=model, opt=opt, tokens=tokens)


@idiom()
def collated_inside() -> Loop:
    """A list of sequences of different lengths, padded by the step, with a mask by comparison."""
    model, opt = small_training()

    def step(rows, y):
        x = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.arange(x.size(1)) < lengths.unsqueeze(1)
        logits = (model(x) * mask.unsqueeze(2)).sum(1) / lengths.unsqueeze(1)
        return update(F.cross_entropy(logits, y), opt)

    def arguments(call):
        x, lengths, y = sequences(call)
        return [row[:length] for row, length in zip(x, lengths.tolist(), strict=True)], y

    return loop(step, arguments, model=model, opt=opt)


@idiom()
def split_by_lengths() -> Loop:
    """Rows of several graphs in one tensor, split by a list of counts."""
    model, opt = small_training()

    def step(x, counts, y):
        logits = torch.stack([part.max(0).values for part in model(x).split(counts)])
        return update(F.cross_entropy(logits, y), opt)

    def arguments(call):
        _, lengths, y = sequences(call)
        counts = lengths.tolist()
        return torch.randn(sum(counts), FEATURES, generator=generator(call)), counts, y

    return loop(step, arguments, model=model, opt=opt)


@idiom(ranks=True, inductor=True)
def causal_mask_and_padding() -> Loop:
    """Attention with a mask of the step's own making: all shapes are fixed."""
    attention, head = nn.MultiheadAttention(FEATURES, 2, batch_first=True), nn.Linear(FEATURES, CLASSES)
    model = nn.ModuleList([attention, head])
    opt = sgd(model)

    def step(x, y):
        causal = torch.triu(torch.full((ROWS, ROWS), float("-inf")), diagonal=1)
        x, _ = attention(x[None], x[None], x[None], attn_mask=causal, need_weights=False)
        return update(F.cross_entropy(head(x[0]), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def last_batch_is_smaller() -> Loop:
    """Every fifth batch has three rows only, and the mean is weighted by their number."""
    model, opt = small_training()
    seen = {"rows": 0, "sum": 0.0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        seen["rows"] += x.shape[0]
        seen["sum"] += loss.item() * x.shape[0]
        return seen["sum"] / seen["rows"]

    return loop(step, lambda call: batch(call, 3 if call % 5 == 4 else 5), model=model, opt=opt, seen=seen)


@idiom()
def masked_language_model() -> Loop:
    """Tokens are masked by `bernoulli` in place, and only those are predicted."""
    model = nn.Sequential(nn.Embedding(9, HIDDEN), nn.Linear(HIDDEN, 9))
    opt = sgd(model)

    def step(tokens):
        labels, tokens = tokens.clone(), tokens.clone()
        masked = torch.bernoulli(torch.full(labels.shape, 0.4)).bool()
        labels[~masked] = -100
        tokens[masked] = 8
        logits = model(tokens).view(-1, 9)
        return update(F.cross_entropy(logits, labels.view(-1), reduction="sum") / labels.numel(), opt)

    def arguments(call):
        return (torch.randint(8, (4, 5), generator=generator(call)),)

    return loop(step, arguments, model=model, opt=opt)


@idiom()
def negatives_sampled() -> Loop:
    """As many negatives as positives: `multinomial` draws a number of them that Python has read."""
    model = mlp()
    opt = sgd(model)

    def step(x, y):
        scores = model(x)
        positive = y == 0
        count = max(1, int(positive.sum()))
        drawn = torch.multinomial((~positive).float() + 1e-6, min(count, len(x)), replacement=True)
        loss = F.softplus(-scores[positive]).sum() + F.softplus(scores[drawn]).sum()
        return update(loss / len(x), opt)

    return loop(step, model=model, opt=opt)
