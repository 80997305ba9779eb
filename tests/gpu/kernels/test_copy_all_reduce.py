"""Reductions by copy engines, on GPUs that see each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.gpu.test_inductor import TOLERANCE, close, train
from tests.unit.lower.inductor.test_segment_compiler import train_step
from wholestep.ir import node_meta
from wholestep.ir.op_info import WAIT
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_, ALL_REDUCE_WIDE
from wholestep.lower.foreach import multi_tensor, triton_codegen
from wholestep.lower.kernels import copy_all_reduce
from wholestep.passes.comm import use_copy_engine

pytestmark = pytest.mark.gpu


def _operator() -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    group = dist.group.WORLD
    assert copy_all_reduce.why_not(group.group_name, world.device) == ""
    draw = torch.Generator(device="cuda").manual_seed(world.rank)
    piece = copy_all_reduce.PIECE_BYTES // 4
    for dtype, length in [
        (torch.float32, 1), (torch.float32, piece - 3), (torch.float32, 2 * piece + 1001), (torch.bfloat16, 5_000_001),
        (torch.float64, 1_000_003), (torch.float32, 4096),
    ]:  # fmt: skip
        message = torch.randn(length, generator=draw, device="cuda").to(dtype)
        gathered = [torch.empty_like(message) for _ in range(world.size)]
        dist.all_gather(gathered, message)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        wanted = sum(one.to(wide) for one in gathered) / world.size
        found = WAIT(ALL_REDUCE_BY_COPIES_(message, "avg", group.group_name))
        assert found.data_ptr() == message.data_ptr()
        torch.testing.assert_close(found, wanted.to(dtype))
        dist.all_gather(gathered, message)
        assert all(torch.equal(one, message) for one in gathered), "ranks differ"


def _wide_operator() -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    group = dist.group.WORLD
    draw = torch.Generator(device="cuda").manual_seed(world.rank)
    for dtype, length in [(torch.bfloat16, 1), (torch.float16, 5_000_001), (torch.bfloat16, 90_000_003)]:
        message = torch.randn(length, generator=draw, device="cuda").to(dtype)
        before = message.clone()
        gathered = [torch.empty_like(message) for _ in range(world.size)]
        dist.all_gather(gathered, message)
        wanted = torch.zeros(length, device="cuda")
        for one in gathered:
            wanted += one.float()
        found = WAIT(ALL_REDUCE_WIDE(message, "avg", torch.float32, group.group_name))
        assert found.dtype is torch.float32
        assert torch.equal(found, wanted * (1 / world.size))
        assert torch.equal(message, before)
        for _ in range(3):  # nobody holds the message while it travels
            found = ALL_REDUCE_WIDE(before * 2, "sum", torch.float32, group.group_name)
            torch.full_like(before, torch.nan)
            assert torch.equal(WAIT(found), wanted * 2)


def test_the_operator_reduces(nccl2) -> None:
    nccl2.run(_operator)


def test_half_precision_is_added_in_float32(nccl2) -> None:
    nccl2.run(_wide_operator)


def test_half_precision_is_added_in_float32_on_four_gpus(nccl4) -> None:
    nccl4.run(_wide_operator)


def test_the_operator_reduces_on_four_gpus(nccl4) -> None:
    nccl4.run(_operator)


NUMBERS = (1_000_003, 45_000_001, 2_097_152, 3_000_017, 130_000_011, 12_000_007)
"""Of elements of float32: one piece or two, and 4 of the largest message."""


def _replays() -> None:
    """Messages one after the other, in a graph that is replayed with other numbers, beside products; one between."""
    world = ws.init()
    torch.cuda.set_device(world.device)
    group = dist.group.WORLD
    draw = torch.Generator(device="cuda").manual_seed(world.rank)
    sources = [torch.randn(number, generator=draw, device="cuda") for number in NUMBERS]
    messages = [torch.full_like(source, torch.nan) for source in sources]
    between = torch.empty_like(sources[1])
    factor = torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        started = []
        for source, message in zip(sources, messages, strict=True):
            message.copy_(source.mul_(2))
            started.append(ALL_REDUCE_BY_COPIES_(message, "sum", group.group_name))
            torch.mm(factor, factor)  # a load
        for one in started:
            WAIT(one)

    step()
    _are_sums(messages, sources)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for number in range(20):
        torch.cuda._sleep(3_000_000 * ((number + world.rank) % world.size))  # ranks come at different times
        for source in sources:
            source.normal_(generator=draw)
        graph.replay()
        if number % 3 == 0:
            between.copy_(sources[1])
            WAIT(ALL_REDUCE_BY_COPIES_(between, "sum", group.group_name))
            graph.replay()
            _are_sums([between], [sources[1] / 2])
        _are_sums(messages, sources)


def _are_sums(messages: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    for message, source in zip(messages, sources, strict=True):
        gathered = [torch.empty_like(source) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, source)
        wanted = torch.zeros_like(source)
        for one in gathered:  # in the order of the ranks
            wanted += one
        assert torch.equal(message, wanted)


def test_graphs_of_messages_are_replayed(nccl2) -> None:
    nccl2.run(_replays)


def test_graphs_of_messages_are_replayed_on_four_gpus(nccl4) -> None:
    nccl4.run(_replays)


ROWS = 80_000
"""Of the embedding, whose gradient travels in two pieces: 82 MB in float64."""


class Words(nn.Module):
    """(rows) words -> (rows, 5). The gradient of the embedding comes last, 41 MB, and is the sum of two look-ups."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, 128)
        self.body = nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embedding(x) + self.embedding(x.flip(0)))


def _step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def _train_words(step: Callable[..., Tensor], rank: int, *, ddp: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Words().double().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]) if ddp else model
    losses = []
    for number in range(20):
        draw = torch.Generator().manual_seed(100 * number + rank)
        x, y = (torch.randint(limit, (512,), generator=draw).cuda() for limit in (ROWS, 5))
        losses.append(step(wrapped, opt, x, y))
    return torch.stack(losses), dict(model.state_dict())


def _updates_early() -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    begin, begun = multi_tensor.MultiTensorSegment._begin, list[int]()

    def noted(*args: Any) -> int:
        begun.append(begin(*args))
        return begun[-1]

    try:
        multi_tensor.MultiTensorSegment._begin = noted
        step = ws.compile(_step, strategy=ws.DDP(bucket_bytes=1 << 10), backend="inductor")
        found = _train_words(step, world.rank)
        assert step.explain().backend == "inductor, one CUDA graph"
        close(found, _train_words(_step, world.rank, ddp=True))
        assert begun
        assert all(0 < one < ROWS * 128 / triton_codegen.CHUNK for one in begun)
    finally:
        multi_tensor.MultiTensorSegment._begin = begin  # the processes go on to other tests


def test_an_update_begins_before_all_of_its_gradient_is_there(nccl2) -> None:
    nccl2.run(_updates_early)


def test_an_update_begins_before_all_of_its_gradient_is_there_on_four_gpus(nccl4) -> None:
    nccl4.run(_updates_early)


def _autocast_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def _train_in_half(step: Callable[..., Tensor], rank: int, *, ddp: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 256)).cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]) if ddp else model
    draw = torch.Generator().manual_seed(rank)
    losses = [step(wrapped, opt, torch.randn(64, 256, generator=draw).cuda()) for _ in range(10)]
    return torch.stack(losses), dict(model.state_dict())


def _in_half() -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    before, use_copy_engine.MIN_BYTES = use_copy_engine.MIN_BYTES, 0
    try:
        step = ws.compile(_autocast_step, backend="inductor")
        losses, _ = _train_in_half(step, world.rank)
        assert step.explain().backend == "inductor, one CUDA graph"
        (start,) = step.graph.graph.find_nodes(op="call_function", target=ALL_REDUCE_WIDE)
        assert node_meta.tensor(start.args[0]).dtype is torch.bfloat16
        wanted, _ = _train_in_half(_autocast_step, world.rank, ddp=True)
        # Activations are rounded to bfloat16, in other places where kernels are fused.
        torch.testing.assert_close(losses, wanted, rtol=2**-8, atol=0)
    finally:
        use_copy_engine.MIN_BYTES = before  # the processes go on to other tests


def test_gradients_of_products_travel_in_half_precision(nccl2) -> None:
    nccl2.run(_in_half)


def test_gradients_of_products_travel_in_half_precision_on_four_gpus(nccl4) -> None:
    nccl4.run(_in_half)


def _trains() -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    before, use_copy_engine.MIN_BYTES = use_copy_engine.MIN_BYTES, 0
    try:
        _train_by_copies(world)
    finally:
        use_copy_engine.MIN_BYTES = before  # the processes go on to other tests


def _train_by_copies(world: ws.World) -> None:
    step = ws.compile(train_step, backend="inductor")
    close(train("adamw_fused", step, rank=world.rank), train("adamw_fused", train_step, rank=world.rank, ddp=True))
    assert step.explain().backend == "inductor, one CUDA graph"
    assert "all_reduce_by_copies" in step.plan
    plain = ws.compile(train_step, backend=ws.Inductor(copy_engines=False))
    losses, _ = train("sgd_fused", plain, rank=world.rank)
    assert "all_reduce_by_copies" not in plain.plan
    torch.testing.assert_close(losses, train("sgd_fused", step, rank=world.rank)[0], rtol=TOLERANCE, atol=TOLERANCE)


def test_two_ranks_train_as_eager_ddp_does(nccl2) -> None:
    nccl2.run(_trains)


def test_four_ranks_train_as_eager_ddp_does(nccl4) -> None:
    nccl4.run(_trains)
