"""The Inductor backend and its CUDA graph on GPUs, in float64: a rate that is frozen or a stale buffer cannot hide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

import wholestep as ws
from tests.unit.lower.inductor.test_segment_compiler import TOLERANCE, train_step

pytestmark = pytest.mark.gpu

STEPS = 50
GRAPH = "inductor, one CUDA graph"

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw_single": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "sgd_foreach": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=True),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True),
}


class Net(nn.Module):
    """(rows, 6) -> (rows, 5), with batch norm, whose buffers the step writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batch(number: int, rank: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
    return x.cuda(), torch.randint(5, (rows,), generator=draw).cuda()


def train(
    kind: str,
    step: Callable[..., Tensor],
    *,
    rank: int = 0,
    ddp: bool = False,
    rows: Callable[[int], int] = lambda n: 8,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, read only at the end, and the state of the model."""
    torch.manual_seed(0)
    model = Net().double().cuda()
    opt = OPTIMIZERS[kind](model.parameters())
    wrapped = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()]) if ddp else model
    schedule = OneCycleLR(opt, 3e-2, total_steps=STEPS + 1)  # betas or momentum move, too
    losses = []
    for number in range(STEPS):
        losses.append(step(wrapped, opt, *batch(number, rank, rows(number))))
        schedule.step()
    return torch.stack(losses).cpu(), {name: value.cpu() for name, value in model.state_dict().items()}


def close(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(found[1], wanted[1], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_trains_as_eager_code_does(kind: str) -> None:
    step = ws.compile(train_step, backend="inductor")
    close(train(kind, step), train(kind, train_step))
    assert step.explain().backend == GRAPH


def test_is_what_auto_means_on_a_gpu() -> None:
    step = ws.compile(train_step)
    close(train("adamw_fused", step), train("adamw_fused", train_step))
    assert step.explain().backend == "inductor, one CUDA graph (auto: there is a GPU)"


def test_without_a_graph() -> None:
    step = ws.compile(train_step, backend=ws.Inductor(cuda_graph=False))
    close(train("adamw_fused", step), train("adamw_fused", train_step))
    assert "not asked for" in step.explain().backend


def test_signatures_share_memory_and_keep_results() -> None:
    step = ws.compile(train_step, backend="inductor", dynamic=False)
    rows = lambda number: 8 if number % 3 else 12  # noqa: E731
    close(train("adamw_fused", step, rows=rows), train("adamw_fused", train_step, rows=rows))
    assert step.explain().backend == GRAPH


def test_a_parameter_that_has_moved_is_captured_again() -> None:
    def run(step: Callable[..., Tensor]) -> Tensor:
        torch.manual_seed(0)
        model = Net().double().cuda()
        opt = OPTIMIZERS["sgd_fused"](model.parameters())
        losses = []
        for number in range(8):
            if number == 5:
                model.head.weight.data = model.head.weight.data * 0.5
            losses.append(step(model, opt, *batch(number, 0)))
        return torch.stack(losses).cpu()

    step = ws.compile(train_step, backend="inductor")
    found = run(step)
    assert step.explain().backend == GRAPH
    torch.testing.assert_close(found, run(train_step), rtol=TOLERANCE, atol=TOLERANCE)


def test_random_numbers_go_on() -> None:
    x = torch.ones(10_000, device="cuda")
    step = ws.compile(lambda x: F.dropout(x * 2, 0.5), backend="inductor")
    drawn = [step(x) for _ in range(6)]
    assert all(abs(float((one == 0).double().mean()) - 0.5) < 0.05 for one in drawn)
    assert not any(torch.equal(one, other) for n, one in enumerate(drawn) for other in drawn[:n])
    assert step.explain().backend == GRAPH


@torch.library.custom_op("wholestep_gpu_tests::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    """A copy, made when the host has read a number of it, which no CUDA graph can do."""
    return x * (1.0 if x.sum().item() > 0 else 2.0)


@waits.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def draws_behind_a_wait(x: Tensor) -> Tensor:
    return F.dropout(waits(x), 0.5)


def test_torch_is_as_it_was_behind_a_capture_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(10_000, device="cuda")
    before = ws.compile(lambda x: F.dropout(x * 3, 0.5), backend="inductor")
    drawn = [before(x) for _ in range(4)]
    assert before.explain().backend == GRAPH

    def draw(options: ws.Inductor) -> tuple[list[Tensor], ws.CompiledStep]:
        torch.manual_seed(5)
        step = ws.compile(draws_behind_a_wait, backend=options)
        return [step(x) for _ in range(6)], step

    found, failed = draw(ws.Inductor())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    said = failed.explain().backend
    assert "its capture failed" in said
    assert "waits" in said
    told = [one.getMessage() for one in caplog.records if "its capture failed" in one.getMessage()]
    assert len(told) == 1
    # Random numbers went on as if nothing had happened, in that step, without one and in graphs from before.
    assert all(map(torch.equal, found, draw(ws.Inductor(cuda_graph=False))[0]))
    eager = [F.dropout(x, 0.5) for _ in range(2)]
    drawn += [before(x) for _ in range(4)]
    for kept in (drawn, found, eager):
        assert all(abs(float((one == 0).double().mean()) - 0.5) < 0.05 for one in kept)
        assert not any(torch.equal(one, other) for n, one in enumerate(kept) for other in kept[:n])
    # Memory is allocated and given back.
    held = torch.cuda.memory_allocated()
    large = torch.ones(1 << 26, device="cuda")
    assert large.sum().item() == 1 << 26
    del large
    assert torch.cuda.memory_allocated() == held
    torch.cuda.empty_cache()
    # Others are captured.
    behind = ws.compile(train_step, backend="inductor")
    close(train("adamw_fused", behind), train("adamw_fused", train_step))
    assert behind.explain().backend == GRAPH


def test_gradients_that_stay() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.zero_grad()
        loss.backward()
        return loss.detach()

    def run(fn: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net().double().cuda()
        kept = []
        for number in range(6):
            fn(model, *batch(number, 0))
            kept.append(model.head.weight.grad)
        return [one.cpu() for one in kept]

    compiled = ws.compile(step, backend="inductor")
    torch.testing.assert_close(run(compiled), run(step), rtol=TOLERANCE, atol=TOLERANCE)
    assert compiled.explain().backend == GRAPH


def _ranks(kind: str) -> None:
    world = ws.init()
    torch.cuda.set_device(world.device)
    step = ws.compile(train_step, backend="inductor")
    found = train(kind, step, rank=world.rank)
    close(found, train(kind, train_step, rank=world.rank, ddp=True))
    assert step.explain().backend == GRAPH
    assert "all_reduce" in step.plan


@pytest.mark.parametrize("kind", ["adamw_foreach", "adamw_fused", "sgd_foreach"])
def test_two_ranks_train_as_eager_ddp_does(kind: str, nccl2: Any) -> None:
    nccl2.run(_ranks, kind)
