"""A CUDA graph draws what eager code draws where blocks with dropout are computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from wholestep.lower.cudagraph.graph_pool import Pool

pytestmark = pytest.mark.gpu

STEPS, WIDTH, BLOCKS = 9, 64, 4


class Block(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self.up, self.down = rate, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.dropout(F.gelu(self.up(x)), self.rate)
        return x + F.dropout(self.down(inner), self.rate)


class Net(nn.Module):
    def __init__(self, rate: float, checkpoints: bool) -> None:
        super().__init__()
        self.blocks, self.checkpoints = nn.ModuleList(Block(rate) for _ in range(BLOCKS)), checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = F.dropout(x, 0.1)
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return x


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train(
    step: Callable[..., Tensor], *, rate: float, checkpoints: bool, rows: tuple[int, ...] = (128,)
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and parameters, and the states of the generator. Batches have these rows, by turns."""
    torch.manual_seed(0)
    model = Net(rate, checkpoints).cuda()
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(max(rows), WIDTH, device="cuda")
    losses, states = [], []
    for number in range(STEPS):
        if number in (3, 6):
            torch.manual_seed(number)
        losses.append(step(model, opt, x[: rows[number % len(rows)]]))
        states.append(torch.cuda.get_rng_state())
    return [*losses, *model.parameters()], states


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("way", ["asked for", "for memory"])
def test_masks_are_those_of_eager_code(way: str, rate: float) -> None:
    options: dict[str, Any] = {}
    if way == "for memory":
        options["passes"] = ws.default_passes(memory_budget=0.7)
    step = ws.compile(train_step, backend="inductor", **options)
    found, wanted = (train(run, rate=rate, checkpoints=way == "asked for") for run in (step, train_step))
    assert "one CUDA graph" in step.explain().backend
    assert all(map(torch.equal, found[1], wanted[1]))  # the generator stands where it stands in eager code
    for one, other in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    again = [node for node in step.program().graph.nodes if "rng_set" in str(node.target)]
    assert bool(again) == (rate > 0)


def test_what_a_capture_writes_comes_before_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has its own stream write where the generator stands, and nobody wait for that."""
    pool, begins = Pool(torch.device("cuda", 0)), torch.cuda.CUDAGraph.capture_begin

    def late(graph: torch.cuda.CUDAGraph, *args: Any, **options: Any) -> None:
        torch.cuda._sleep(100_000_000)
        begins(graph, *args, **options)

    x = torch.zeros(4, device="cuda")
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
        pool.capture(lambda: (x + 1,))
    assert not torch.cuda.current_stream().query()  # it waits as long
    torch.cuda.current_stream().synchronize()
    assert pool._stream is not None
    assert pool._stream.query()


def test_masks_are_those_of_eager_code_where_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of rows is captured after its second batch, in which it is seen where the generator stands."""
    captures, capture = list[Any](), Pool.capture
    monkeypatch.setattr(Pool, "capture", lambda *args: captures.append(args) or capture(*args))
    step = ws.compile(train_step, backend="inductor", dynamic=True)
    rows = (128, 96)
    found, wanted = (train(run, rate=0.3, checkpoints=True, rows=rows) for run in (step, train_step))
    assert len(captures) == len(rows)
    assert all(map(torch.equal, found[1], wanted[1]))
    for one, other in zip(found[0], wanted[0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
