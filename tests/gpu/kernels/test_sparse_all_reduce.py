"""Gradients of embeddings by rows, on GPUs that see each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.gpu.test_inductor import GRAPH, close
from tests.unit.lower.inductor.test_segment_compiler import train_step
from wholestep.ir.op_info import WAIT
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_, ALL_REDUCE_ROWS_
from wholestep.lower.kernels.sparse_all_reduce import LEAST_TABLE_BYTES, Layout

pytestmark = pytest.mark.gpu


def _table(shape: tuple[int, int], indices: Tensor | None, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    if indices is None:
        return torch.randn(shape, generator=draw, device="cuda").to(dtype)
    table = torch.zeros(shape, dtype=dtype, device="cuda")
    table[indices] = torch.randn((len(indices), shape[1]), generator=draw, device="cuda").to(dtype)
    return table


def _operator() -> None:
    """The bits are those of a reduction of the whole, whatever the ranks have looked up, and the same on all ranks."""
    world = ws.init()
    torch.cuda.set_device(world.device)
    group = dist.group.WORLD.group_name
    draw = torch.Generator(device="cuda").manual_seed(world.rank)
    for shape, dtype in [
        ((50_304, 768), torch.float32), ((20_000, 129), torch.float64), ((9_000, 1500), torch.bfloat16),
    ]:  # fmt: skip
        capacity = Layout.of(shape, dtype, world.size).capacity
        for counts in [(1000, 1024), (0, 1), (capacity, 77), (min(capacity + 1, 60_000), 5), (None, 2000)]:
            count = counts[world.rank % 2]
            indices = None if count is None else torch.randint(shape[0], (count,), generator=draw, device="cuda")
            table = _table(shape, indices, dtype, draw)
            for op in ("sum", "avg"):
                whole, rows = table.clone(), table.clone()
                WAIT(ALL_REDUCE_BY_COPIES_(whole, op, group))
                found = WAIT(ALL_REDUCE_ROWS_(rows, op, group, indices=indices))
                assert found.data_ptr() == rows.data_ptr()
                assert torch.equal(rows, whole), (shape, dtype, counts, op)
                gathered = [torch.empty_like(rows) for _ in range(world.size)]
                dist.all_gather(gathered, rows)
                assert all(torch.equal(one, rows) for one in gathered), "ranks differ"


def test_the_operator_adds_rows(nccl2: Any) -> None:
    nccl2.run(_operator)


def test_the_operator_adds_rows_on_four_gpus(nccl4: Any) -> None:
    nccl4.run(_operator)


def _replays() -> None:
    """In a graph that is replayed with other rows, between messages that use the same memory; ranks come apart."""
    world = ws.init()
    torch.cuda.set_device(world.device)
    group = dist.group.WORLD.group_name
    draw = torch.Generator(device="cuda").manual_seed(world.rank)
    shape, count = (50_304, 768), 1024 if world.rank else 30_000  # the first one has too many
    indices = torch.zeros(count, dtype=torch.int64, device="cuda")
    source, table = torch.zeros(shape, device="cuda"), torch.empty(shape, device="cuda")
    dense = [torch.randn(number, generator=draw, device="cuda") for number in (30_000_001, 2_000_003)]
    messages = [torch.empty_like(one) for one in dense]

    def step() -> None:
        table.copy_(source)
        for one, other in zip(messages, dense, strict=True):
            one.copy_(other)
        started = [
            ALL_REDUCE_BY_COPIES_(messages[0], "sum", group),
            ALL_REDUCE_ROWS_(table, "sum", group, indices=indices),
            ALL_REDUCE_BY_COPIES_(messages[1], "sum", group),
        ]
        for one in started:
            WAIT(one)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for number in range(12):
        torch.cuda._sleep(3_000_000 * ((number + world.rank) % world.size))
        indices.copy_(torch.randint(shape[0], (count,), generator=draw, device="cuda"))
        source.copy_(_table(shape, indices, torch.float32, draw))
        graph.replay()
        for found, given in [(table, source), *zip(messages, dense, strict=True)]:
            gathered = [torch.empty_like(given) for _ in range(world.size)]
            dist.all_gather(gathered, given)
            wanted = torch.zeros_like(given)
            for one in gathered:  # in the order of the ranks
                wanted += one
            assert torch.equal(found, wanted), number


def test_graphs_with_rows_are_replayed(nccl2: Any) -> None:
    nccl2.run(_replays)


def test_graphs_with_rows_are_replayed_on_four_gpus(nccl4: Any) -> None:
    nccl4.run(_replays)


WORDS, WIDTH = 40_000, 128


class Words(nn.Module):
    """(n) words -> (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x))


def _train(step: Callable[..., Tensor], rank: int, *, ddp: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Words repeat, and the last rank comes with more of them from the tenth step on, and too many at the end."""
    torch.manual_seed(0)
    model = Words().double().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]) if ddp else model
    last, losses = dist.get_world_size() - 1, []
    for number in range(20):
        draw = torch.Generator().manual_seed(100 * number + rank)
        count = 512 if rank < last or number < 10 else 300 if number < 15 else 200_000
        x, y = (torch.randint(limit, (count,), generator=draw).cuda() for limit in (WORDS, 5))
        losses.append(step(wrapped, opt, x % (40 + 1000 * number), y))
    return torch.stack(losses), dict(model.state_dict())


def _trains(dynamic: bool | None) -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    assert WORDS * WIDTH * 8 >= LEAST_TABLE_BYTES
    assert Layout.of((WORDS, WIDTH), torch.float64, world.size).capacity < 200_000
    step = ws.compile(train_step, backend="inductor", dynamic=dynamic)
    close(_train(step, world.rank), _train(train_step, world.rank, ddp=True))
    if dynamic is None:
        return  # one trace has numbers of rows as symbols
    assert step.explain().backend == GRAPH
    (start,) = step.graph.graph.find_nodes(op="call_function", target=ALL_REDUCE_ROWS_)
    assert "indices" in start.kwargs
    assert step.cache_info().traces == (3 if world.rank == world.size - 1 else 1)


@pytest.mark.parametrize("dynamic", [False, None])
def test_ranks_train_as_eager_ddp_does_whatever_their_batches_are(nccl2: Any, dynamic: bool | None) -> None:
    nccl2.run(_trains, dynamic)


@pytest.mark.parametrize("dynamic", [False, None])
def test_four_ranks_do(nccl4: Any, dynamic: bool | None) -> None:
    nccl4.run(_trains, dynamic)
