"""Memsets of CUDA graphs as kernels: the same bytes, and no memset left in a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.lower.cudagraph import memset_nodes

pytestmark = pytest.mark.gpu

NUM_BYTES = 4099
FILLS: dict[str, Callable[[object, int, object], object]] = {
    "0 by bytes": lambda driver, at, stream: driver.cuMemsetD8Async(at, 0, NUM_BYTES, stream),
    "0 of 8 aligned bytes": lambda driver, at, stream: driver.cuMemsetD8Async(at, 0, NUM_BYTES // 8 * 8, stream),
    "171 by bytes": lambda driver, at, stream: driver.cuMemsetD8Async(at + 3, 0xAB, NUM_BYTES - 3, stream),
    "by two bytes": lambda driver, at, stream: driver.cuMemsetD16Async(at + 2, 0xFEDC, 1001, stream),
    "by four bytes": lambda driver, at, stream: driver.cuMemsetD32Async(at + 4, 0xFEDCBA98, 513, stream),
    "in two dimensions": lambda driver, at, stream: driver.cuMemsetD2D8Async(at, 64, 7, 32, 20, stream),
}


def captured(body: Callable[[], object]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        body()
    return graph


def kinds(graph: torch.cuda.CUDAGraph) -> list[str]:
    nodes = memset_nodes.Graph(graph)
    return sorted(map(nodes.kind, nodes.nodes()))


@pytest.mark.parametrize("name", FILLS)
def test_a_kernel_writes_the_same_bytes(name: str) -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    target = torch.full((NUM_BYTES + 5,), 7, dtype=torch.uint8, device="cuda")

    def body() -> None:
        target.add_(1)  # so that there is something before it and after
        FILLS[name](driver, target.data_ptr(), torch.cuda.current_stream().cuda_stream)
        target.bitwise_xor_(1)

    graph = captured(body)
    assert kinds(graph) == ["KERNEL", "KERNEL", "MEMSET"]
    torch.cuda.synchronize()
    target.fill_(7)
    graph.instantiate()
    graph.replay()
    wanted = target.clone()
    num_left = int(name == "in two dimensions")
    assert memset_nodes.replace_memsets(graph, captured, target.device) == 1 - num_left
    assert kinds(graph).count("MEMSET") == num_left
    assert len(kinds(graph)) == 3
    target.fill_(7)
    graph.instantiate()
    graph.replay()
    assert torch.equal(target, wanted)
    assert not torch.equal(target, torch.full_like(target, 9))


def test_nodes_on_several_streams_wait_as_before() -> None:
    """Two branches fill and read in turn; any lost edge would let a kernel read what is not there yet."""
    big, small = (torch.zeros(size, device="cuda") for size in (1 << 26, 1 << 10))
    seen = torch.zeros(3, device="cuda")
    side = torch.cuda.Stream()

    def body() -> None:
        big.fill_(1)
        side.wait_stream(torch.cuda.current_stream())
        big.zero_()
        with torch.cuda.stream(side):
            small.fill_(2)
            side.wait_stream(torch.cuda.current_stream())
            small.copy_(big[: 1 << 10] + 3)
            small.mul_(big[-1] + 2)
        torch.cuda.current_stream().wait_stream(side)
        seen.copy_(torch.stack([big.max(), small.min(), small.max()]))
        small.zero_()

    graph = captured(body)
    assert memset_nodes.replace_memsets(graph, captured, big.device) >= 1
    assert "MEMSET" not in kinds(graph)
    graph.instantiate()
    for _ in range(20):
        graph.replay()
        assert seen.tolist() == [0.0, 6.0, 6.0]


class Attention(nn.Module):
    """Its backward fills the memory that it adds up in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 768)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unflatten(-1, (3, 4, 64)).unbind(2)
        return nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )


def train_step(model: nn.Module, x: Tensor) -> Tensor:
    model.zero_grad()
    loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def test_a_step_has_no_memsets(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 256, 256, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = Attention().to("cuda", torch.bfloat16)
        step = ws.compile(train_step, backend="inductor")
        found = [step(model, x) for _ in range(5)]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            found.append(step(model, x))
            torch.cuda.synchronize()
        assert step.explain().backend == "inductor, one CUDA graph"
        return [*found, *(one.grad for one in model.parameters())], sum("Memset" in e.name for e in profile.events())

    with_kernels, num_left = run()
    monkeypatch.setattr(memset_nodes, "replace_memsets", lambda *args: 0)
    with_memsets, num_before = run()
    assert num_before > 0
    assert num_left == 0
    for one, other in zip(with_kernels, with_memsets, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=2.0**-9)
