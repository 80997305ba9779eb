"""Gradients of embeddings as rows on two ranks, against DistributedDataParallel, which reduces the whole table."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws

pytestmark = pytest.mark.ranks

WORDS, WIDTH, LENGTH, LIMIT = 60_000, 16, 4, 32
PADDING, LR, EPS = 7, 0.1, torch.finfo(torch.float32).eps


class Net(nn.Module):
    """Words -> their mean -> five numbers; word 7 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.words(words).mean(1))


def make() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Net()
    for param in model.parameters():
        param.grad = torch.zeros_like(param)  # as in every later call
    return model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(words).square().sum()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def batches(rows: Sequence[Sequence[int]], num_words: int) -> list[Tensor]:
    """Other words on every rank. `rows`: per call those of each rank. 0: each word once on a rank, many on both."""
    draw, rank = torch.Generator().manual_seed(10 + dist.get_rank()), dist.get_rank()
    sizes = [(call[rank], LENGTH) for call in rows]
    if num_words:
        return [torch.randint(num_words, size, generator=draw) for size in sizes]
    return [torch.randperm(2 * LIMIT, generator=draw)[: size[0] * LENGTH].reshape(size) for size in sizes]


def beside_ddp(rows: Sequence[Sequence[int]], num_words: int) -> dict[str, Any]:
    """What a rank sees: its parameters and gradients, how far they are from eager ones, and what travelled."""
    step = ws.compile(train, strategy=ws.DDP(embedding_rows=LIMIT), backend="eager")
    (ours, ours_opt), (eager, eager_opt) = make(), make()
    wrapped = DistributedDataParallel(eager)
    for words in batches(rows, num_words):
        step(ours, ours_opt, words)
        train(wrapped, eager_opt, words)
    pairs = [
        pair
        for one, other in zip(ours.parameters(), eager.parameters(), strict=True)
        for pair in ((one.detach(), other.detach()), (one.grad, other.grad))
    ]
    return {
        "ours": [one.clone() for one, _ in pairs],
        "equal": all(torch.equal(one, other) for one, other in pairs),
        "far": max(float((one - other).abs().max()) for one, other in pairs),
        "travels": [(one.op, one.dtype, one.num_bytes) for one in step.explain().collectives],
        "traces": step.cache_info().traces,
    }


TRAVELS = [
    ("all_gather_into_tensor", "int64", 8 * LIMIT),
    ("all_reduce", "float32", 4 * (5 * WIDTH + 5)),
    ("all_gather_into_tensor", "float32", 4 * LIMIT * WIDTH),
]


def far_at_most(calls: int) -> float:
    """A word is there at most twice `LIMIT` times. Clipped gradients have norms of at most 1, so no sum is larger; each
    of its additions rounds by EPS, and so do a few operations around. Momentum adds up to ten of them per call."""
    return calls * 10 * (2 * LIMIT + 10) * EPS


def test_the_numbers_are_those_of_ddp_where_words_repeat(pool2: Any) -> None:
    first, second = pool2.run(beside_ddp, [(8, 8)] * 4, 20)
    assert first["far"] <= far_at_most(4)
    assert [first["travels"], second["travels"]] == [TRAVELS] * 2
    assert all(map(torch.equal, first["ours"], second["ours"]))
    table, gradient = first["ours"][:2]
    assert torch.equal(table[PADDING], torch.zeros(WIDTH))
    assert torch.equal(gradient[PADDING], torch.zeros(WIDTH))
    assert gradient[:20].any(1).sum() > 10


def test_they_are_the_same_bits_where_a_rank_has_a_word_once(pool2: Any) -> None:
    """A sum of two terms has no order."""
    found = pool2.run(beside_ddp, [(8, 8)] * 4, 0)
    assert [one["equal"] for one in found] == [True] * 2
    assert all(map(torch.equal, found[0]["ours"], found[1]["ours"]))


def test_a_rank_with_a_smaller_batch_fills_up(pool2: Any) -> None:
    """It captures again, alone or with the other one, and runs the same collectives."""
    found = pool2.run(beside_ddp, [(8, 8), (8, 6), (6, 8), (5, 4), (8, 8)], 0)
    assert [one["traces"] for one in found] == [3, 3]
    assert [one["equal"] for one in found] == [True] * 2
    assert [one["travels"] for one in found] == [TRAVELS] * 2


def with_too_many() -> None:
    step = ws.compile(train, strategy=ws.DDP(embedding_rows=LIMIT), backend="eager")
    model, optimizer = make()
    before = copy.deepcopy(model.state_dict())
    rank = dist.get_rank()
    said = f"up {4 * 9} of words.weight" if rank else "Rank 1 gave up"
    with pytest.raises(ws.ConfigError if rank else ws.RankMissingError, match=said):
        step(model, optimizer, torch.zeros(8 + rank, LENGTH, dtype=torch.int64))
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_more_rows_than_were_said_end_the_step_on_all_ranks(pool2: Any) -> None:
    pool2.run(with_too_many)
