"""Batches of other sizes in each call, on a GPU: one program, kernels for all sizes, graphs for those that come again.

In float64, where a difference is a fault and no rounding.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.behaviour.moving_sizes.test_inductor import noting
from wholestep.ir.segment import Segment
from wholestep.lower.cudagraph.graph_pool import Pool

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CALLS, WORDS, WIDTH = 24, 64, 32
CLOSE = 2**10 * torch.finfo(torch.float64).eps


class Text(nn.Module):
    """A transformer block with a mask and dropout that draws nothing, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(128, WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 128), nn.Linear(128, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: [batch, length] of words."""
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        q, k, v = self.mix(self.norm(h)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = self.head(self.last(h + self.down(F.gelu(self.up(h)))))
        return out


def next_word(model: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def given_apart(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Arguments that are slices of a larger tensor."""
    return F.cross_entropy(model(x).flatten(0, 1), y.reshape(-1))


def of_a_mask(model: Any, x: Tensor) -> Tensor:
    """As many words as data says."""
    mask = x[:, :-1] % 3 > 0
    return F.cross_entropy(model(x[:, :-1])[mask], x[:, 1:][mask])


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.second(F.relu(self.norm(self.first(x))))).mean((2, 3)))
        return out


def classes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def words(draw: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
    rows, length = draw.choice((2, 4)), draw.choice((9, 17, 40))
    return (torch.randint(WORDS, (rows, length), generator=numbers).to(DEVICE),)


def slices(draw: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
    (both,) = words(draw, numbers)
    return both[:, :-1], both[:, 1:]


def images(draw: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
    rows, side = 4, draw.choice((8, 12, 15))
    x, y = torch.randn(rows, 3, side, side + 2, generator=numbers), torch.randint(5, (rows,), generator=numbers)
    return x.double().to(DEVICE), y.to(DEVICE)


Case = tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[..., tuple[Tensor, ...]]]
CASES: dict[str, Case] = {
    "lengths": (Text, next_word, words),
    "slices of a batch": (Text, given_apart, slices),
    "a mask": (Text, of_a_mask, words),
    "images": (Images, classes, images),
}


def trained(
    case: Case, kind: str, rank: int = 0, calls: int = CALLS, **options: Any
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses, parameters and the step, after some calls in one way of ``eager``, ``ddp`` or ``compiled``."""
    make, loss_of, draw = case
    torch.manual_seed(0)
    model = make().to(DEVICE).double()
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]) if kind == "ddp" else model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(wrapped, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run: Any = ws.compile(step, fullgraph=True, **options) if kind == "compiled" else step
    draws, numbers = random.Random(rank), torch.Generator().manual_seed(rank)
    losses = [run(*draw(draws, numbers)) for _ in range(calls)]
    return losses, [one.detach() for one in model.parameters()], run


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    return noting(monkeypatch)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured, as it happens."""
    found: list[Any] = []
    capture = Pool.capture

    def noting(self: Pool, *args: Any) -> Any:
        found.append(capture(self, *args))
        return found[-1]

    monkeypatch.setattr(Pool, "capture", noting)
    return found


@pytest.mark.parametrize("name", CASES)
def test_equals_eager_code(name: str, begun: list[Segment], captures: list[Any]) -> None:
    losses, params, _ = trained(CASES[name], "eager")
    found, own, step = trained(CASES[name], "compiled", backend="inductor")
    torch.testing.assert_close(found, losses, rtol=CLOSE, atol=CLOSE)
    # Adam makes large steps of small differences.
    torch.testing.assert_close(own, params, rtol=2**10 * CLOSE, atol=2**10 * CLOSE)
    assert step.cache_info().traces <= 3, step.cache_info()
    assert any(segment.symbols for segment in begun)
    sizes = 6 if name != "images" else 3
    if DEVICE.type == "cuda":
        per_size = 2 if name == "a mask" else 1
        assert 0 < len(captures) <= (sizes + 3) * per_size + 2, len(captures)
        assert "CUDA graph" in step.explain().backend


def test_a_slice_of_one_size_is_read_as_it_lies() -> None:
    """Where no size moves either: the graph's own copy of an argument lies as the argument does."""
    make, loss_of, _ = CASES["slices of a batch"]

    def draw(_: random.Random, numbers: torch.Generator) -> tuple[Tensor, ...]:
        both = torch.randint(WORDS, (3, 12), generator=numbers).to(DEVICE)
        return both[:, :-1], both[:, 1:]

    losses, _, _ = trained((make, loss_of, draw), "eager")
    found, _, _ = trained((make, loss_of, draw), "compiled", backend="inductor", dynamic=False)
    torch.testing.assert_close(found, losses, rtol=CLOSE, atol=CLOSE)


def test_memory_does_not_grow_with_the_number_of_sizes(captures: list[Any]) -> None:
    reserved_bytes = []
    for num_sizes in (1, 16):
        lengths = itertools.cycle(8 * (16 - number) for number in range(num_sizes))

        def draw(_: random.Random, numbers: torch.Generator, lengths: Iterator[int] = lengths) -> tuple[Tensor, ...]:
            return (torch.randint(WORDS, (64, next(lengths)), generator=numbers).to(DEVICE),)

        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        _, _, step = trained((Text, next_word, draw), "compiled", calls=5 * num_sizes, backend="inductor", dynamic=True)
        reserved_bytes.append(torch.cuda.memory_reserved() - before)
        assert step.cache_info().traces == 1
        del step
    assert len(captures) >= 1 + 16
    assert reserved_bytes[1] <= 1.5 * reserved_bytes[0], reserved_bytes


def losses_apart(name: str) -> float:
    """How far the losses of this rank are from those of eager DistributedDataParallel, as a share."""
    rank = torch.distributed.get_rank()
    losses, _, _ = trained(CASES[name], "ddp", rank)
    found, _, step = trained(CASES[name], "compiled", rank, backend="inductor", strategy=ws.DDP())
    assert step.cache_info().traces <= 3, step.cache_info()
    return max(float((one - other).abs() / other) for one, other in zip(found, losses, strict=True))


@pytest.mark.parametrize("name", ["lengths", "images"])
def test_ranks_with_other_sizes_equal_eager_ddp(name: str, nccl2: Any) -> None:
    assert max(nccl2.run(losses_apart, name)) < CLOSE


@pytest.mark.parametrize("dynamic", [True, False])
def test_attention_over_lengths_that_move_builds_no_plans(dynamic: bool) -> None:
    """cuDNN builds one for each new length."""
    make, loss_of, draw = CASES["lengths"]
    model = make().to(DEVICE)

    def step(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return loss_of(model, x).detach()

    compiled = ws.compile(step, backend="eager", dynamic=dynamic, fullgraph=True)
    compiled(*draw(random.Random(0), torch.Generator().manual_seed(0)))
    called = [str(node.target) for node in compiled.graph.graph.nodes if "attention" in str(node.target)]
    assert called
    assert not dynamic or not any("cudnn" in one for one in called), called
