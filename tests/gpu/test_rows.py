"""Gradients of embeddings as rows, on GPUs: replicas that hold the same bits, and the numbers of eager DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.passes.rows import SUM_ROWS

pytestmark = pytest.mark.gpu

WORDS, WIDTH, STEPS, EPS = 100_000, 256, 20, torch.finfo(torch.float32).eps


@pytest.mark.parametrize("count", [100, 3072, 3073, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_sum_is_the_same_bits_every_time(count: int, dtype: torch.dtype) -> None:
    draw = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(count, 129, generator=draw, device="cuda").to(dtype)
    indices = torch.randint(50, (count,), generator=draw, device="cuda")
    first = SUM_ROWS(rows, indices, 1000, 3)
    assert all(torch.equal(SUM_ROWS(rows, indices, 1000, 3), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = SUM_ROWS(rows, indices, 1000, 3)
    graph.replay()
    assert torch.equal(again, first)
    wanted = torch.zeros(1000, 129, dtype=torch.float64, device="cuda").index_add_(0, indices, rows.double())
    size = torch.zeros_like(wanted).index_add_(0, indices, rows.double().abs())
    wanted[3] = size[3] = 0
    # Sums are float32 of at most `count` terms; a smaller type rounds once, at the end.
    bound = count * EPS * size + (0 if dtype is torch.float32 else torch.finfo(dtype).eps) * wanted.abs()
    assert bool(((first.double() - wanted).abs() <= bound).all())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, words: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(words), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 10))
    model = model.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _train(limit: int) -> dict[str, Any]:
    world = ws.init()
    torch.cuda.set_device(world.device)
    (ours, ours_opt), (eager, eager_opt) = make(world.device), make(world.device)
    wrapped = DistributedDataParallel(eager, device_ids=[world.device])
    step = ws.compile(train, strategy=ws.DDP(embedding_rows=limit), backend="inductor")
    draw = torch.Generator().manual_seed(world.rank)
    for number in range(STEPS):
        rows = limit - 8 * world.rank * (number % 5 == 4)  # rank 1 comes with fewer now and then
        words, targets = torch.randint(40, (rows,), generator=draw), torch.randint(10, (rows,), generator=draw)
        batch = words.to(world.device), targets.to(world.device)
        step(ours, ours_opt, *batch)
        train(wrapped, eager_opt, *batch)
    equal = []
    for param in ours.parameters():
        others = [torch.empty_like(param) for _ in range(world.size)]
        dist.all_gather(others, param.detach())
        equal.append(all(torch.equal(one, others[0]) for one in others))
    pairs = zip(ours.parameters(), eager.parameters(), strict=True)
    return {
        "equal": equal,
        "far": max(float((one - other).abs().max()) for one, other in pairs),
        "backend": step.explain().backend,
        "travels": [one.num_bytes for one in step.explain().collectives if one.op == "all_gather_into_tensor"],
    }


def check(found: list[dict[str, Any]], limit: int) -> None:
    for one in found:
        assert one["travels"] == [8 * limit, 4 * WIDTH * limit]
        assert one["backend"] == "inductor, one CUDA graph"
        assert one["equal"] == [True] * 5
        # Gradients have norms of at most 1, so a sum of n terms is off by n EPS; momentum adds up ten of them per call,
        # and products of float32 may differ by as much.
        assert one["far"] <= STEPS * 10 * (len(found) * limit + WIDTH) * EPS


@pytest.mark.parametrize("limit", [256, 2048])
def test_ranks_stay_equal_and_train_as_ddp_does(nccl2: Any, limit: int) -> None:
    check(nccl2.run(_train, limit), limit)


def test_four_ranks_do(nccl4: Any) -> None:
    check(nccl4.run(_train, 1024), 1024)
