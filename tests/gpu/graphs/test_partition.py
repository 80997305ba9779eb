"""Steps whose host looks at numbers of the GPU: no more CUDA graphs than they need, and what eager code computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import wholestep as ws
from tests.unit.lower.inductor.test_segment_compiler import TOLERANCE

pytestmark = pytest.mark.gpu

CALLS = 14
Step = Callable[..., Any]


class Net(nn.Module):
    """(rows, 8) -> (rows, 5)."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate, self.head = rate, nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.dropout(block(x), self.rate) if self.rate else x + block(x)
        return self.head(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def update(model: nn.Module, opt: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    opt.step()
    opt.zero_grad()


def returns_a_number(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = loss_of(model, x, y)
    update(model, opt, loss)
    return loss.item()


def reads_before_the_backward(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = loss_of(model, x, y)
    log = {"loss": loss.item(), "wrong": (model(x).argmax(1) != y).sum().item()}
    loss.backward()
    log["norm"] = clip_grad_norm_(model.parameters(), 0.5).item()
    opt.step()
    opt.zero_grad()
    return log


def copies_to_the_host(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    scores = model(x)
    update(model, opt, F.cross_entropy(scores, y))
    return scores.detach().cpu(), scores.detach().argmax(1).tolist()


def gradients_that_stay(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    return loss.detach()


def gradients_that_grow(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    if number % 3 == 2:
        opt.step()
        opt.zero_grad()
    return loss.detach()


def gradients_from_before(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    opt.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss.detach()


def uses_a_number(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = loss_of(model, x, y)
    loss.backward()
    scale = 1 / (1 + loss.item())
    for param in model.parameters():
        param.grad.mul_(scale)
    opt.step()
    opt.zero_grad()
    return loss.detach(), scale


def factors(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    """cuSOLVER cannot be captured, and fails at the first call after a capture that has failed."""
    scores = model(x)
    spread = torch.linalg.eigvalsh(scores.mT @ scores + torch.eye(5, dtype=scores.dtype, device=scores.device))
    loss = F.cross_entropy(scores, y) + spread.log().square().mean()
    update(model, opt, loss)
    return loss.detach()


@torch.library.custom_op("wholestep_gpu_tests::looks", mutates_args=())
def looks(x: Tensor) -> Tensor:
    """A copy, made when the host has read a number of it, of which nobody knows before it is captured."""
    return x * (1.0 if x.sum().item() > -1e9 else 2.0)


looks.register_fake(torch.empty_like)
looks.register_autograd(lambda ctx, grad: grad)


def looks_inside(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = F.cross_entropy(looks(model(x)), y)
    update(model, opt, loss)
    return loss.detach()


def two_parts(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    """The second reads what the first has left in parameters, and what stays in the memory of its graph."""
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    update(model, opt, loss)
    second = F.cross_entropy(model(x * (1 + scores.detach().amax().item())), y) + scores.detach().square().sum()
    update(model, opt, second)
    return loss.detach(), second.detach(), scores.detach()


WAYS: dict[str, tuple[Step, str]] = {
    "returns_a_number": (returns_a_number, "one CUDA graph, cut where"),
    "reads_before_the_backward": (reads_before_the_backward, "one CUDA graph, cut where"),
    "copies_to_the_host": (copies_to_the_host, "one CUDA graph, cut where"),
    "gradients_that_stay": (gradients_that_stay, "one CUDA graph"),
    "gradients_that_grow": (gradients_that_grow, "one CUDA graph"),
    "gradients_from_before": (gradients_from_before, "one CUDA graph"),
    "uses_a_number": (uses_a_number, "2 CUDA graphs, cut where"),
    "looks_inside": (looks_inside, "2 CUDA graphs, cut where"),
    "two_parts": (two_parts, "2 CUDA graphs, cut where"),
    "factors": (factors, "one CUDA graph, cut where"),
}


def batch(number: int, rows: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(number + 100 * rank)
    x = torch.randn(rows, 8, generator=draw, dtype=torch.float64)
    return x.cuda(), torch.randint(5, (rows,), generator=draw).cuda()


def train(
    step: Step, *, rows: Callable[[int], int] = lambda number: 12, rate: float = 0.0, rank: int = 0, ddp: bool = False
) -> tuple[list[Any], Any]:
    """What every call gives, looked at after the last one, and the parameters, gradients and state in the end."""
    torch.manual_seed(0)
    model = Net(rate).double().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    called = DistributedDataParallel(model) if ddp else model
    torch.manual_seed(rank)
    found = [step(called, opt, *batch(number, rows(number), rank), number) for number in range(CALLS)]
    grads = [param.grad for param in model.parameters()]
    return found, (list(model.parameters()), grads, opt.state_dict())


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", WAYS)
def test_trains_as_eager_code_does(name: str) -> None:
    fn, graphs = WAYS[name]
    step = ws.compile(fn, backend="inductor")
    close(train(step), train(fn))
    backend = step.explain().backend
    assert backend.startswith(f"inductor, {graphs}"), backend
    assert graphs.endswith("where") or backend == f"inductor, {graphs}"


def on_ranks(name: str, copy_engines: Any) -> str:
    """How the step ran on a rank, where it did as eager DistributedDataParallel."""
    fn, rank = WAYS[name][0], ws.init().rank
    step = ws.compile(fn, strategy=ws.DDP(), backend=ws.Inductor(copy_engines=copy_engines))
    # Every third call has other rows, on one rank two calls later than on the other one.
    rows = lambda number: 32 if (number - 2 * rank) % 5 == 4 else 12  # noqa: E731
    close(train(step, rows=rows, rate=0.2, rank=rank), train(fn, rows=rows, rate=0.2, rank=rank, ddp=True))
    return step.explain().backend


@pytest.mark.parametrize("copy_engines", ["auto", False], ids=["copies", "nccl"])
@pytest.mark.parametrize("name", WAYS)
def test_ranks_train_as_eager_ddp_does(nccl2: Any, name: str, copy_engines: Any) -> None:
    """Each of them cuts the step in the same places, and captures its pieces when it comes to them."""
    for backend in nccl2.run(on_ranks, name, copy_engines):
        assert backend.startswith(f"inductor, {WAYS[name][1]}"), backend


@pytest.mark.parametrize("name", ["reads_before_the_backward", "uses_a_number", "two_parts"])
def test_signatures_share_their_memory(name: str) -> None:
    rows = lambda number: 12 if number % 3 else 32  # noqa: E731
    fn, graphs = WAYS[name]
    step = ws.compile(fn, backend="inductor")
    close(train(step, rows=rows), train(fn, rows=rows))
    assert step.explain().backend.startswith(f"inductor, {graphs}")


def test_a_parameter_that_has_moved() -> None:
    """All graphs after the first that reads it are captured again."""

    def run(step: Step) -> list[Any]:
        torch.manual_seed(0)
        model = Net().double().cuda()
        opt = torch.optim.SGD(model.parameters(), lr=1e-2)
        found = []
        for number in range(CALLS):
            if number in (5, 6, 9):
                weight = model.blocks[0][0].weight
                weight.data = weight.data * 0.5
            found.append(step(model, opt, *batch(number, 12), number))
        return found

    step = ws.compile(two_parts, backend="inductor")
    close(run(step), run(two_parts))
    assert step.explain().backend.startswith("inductor, 2 CUDA graphs")


def draws(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    scores = model(x)
    loss = F.cross_entropy(scores, y)
    loss.backward()
    scale = 1 / (1 + loss.item())
    second = F.cross_entropy(model(x * scale), y)
    update(model, opt, second)
    return loss.detach(), second.detach()


def draws_again(model: Any, opt: Any, x: Tensor, y: Tensor, number: int) -> Any:
    loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y)
    second = F.cross_entropy(checkpoint(model, x * (1 / (1 + loss.item())), use_reentrant=False), y)
    update(model, opt, loss + second)
    return loss.detach(), second.detach()


@pytest.mark.parametrize("fn", [draws, draws_again])
def test_masks_are_those_of_eager_code(fn: Step) -> None:
    step = ws.compile(fn, backend="inductor")
    found = train(step, rate=0.3)
    state = torch.cuda.get_rng_state()
    close(found, train(fn, rate=0.3))
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert " CUDA graphs, cut where" in step.explain().backend


def test_gradients_that_nobody_holds_stay_in_the_memory_of_the_graph() -> None:
    """And those that somebody holds keep their values, in two signatures by turns."""

    def run(step: Step) -> tuple[list[Any], list[int]]:
        torch.manual_seed(0)
        model = Net().double().cuda()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        seen, kept, places = [], [], []
        for number in range(24):
            step(model, opt, *batch(number, 32 if number % 6 == 5 else 12), number)
            seen += [param.grad.clone() for param in model.parameters()]
            places.append(model.head.weight.grad.data_ptr())
            if number == 14:
                kept += [model.head.weight.grad, model.blocks[0][0].bias.grad[2:]]
        return [seen, kept], places

    step = ws.compile(gradients_from_before, backend="inductor", dynamic=False)
    found, places = run(step)
    close(found, run(gradients_from_before)[0])
    assert step.explain().backend == "inductor, one CUDA graph"
    assert len({*places[6:11]}) == 1  # captured in call 3
    assert places[12] == places[6]  # the other signature has copies
    assert places[15] != places[6]  # where somebody has the first


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_reads_its_numbers_at_once(foreach: bool) -> None:
    def run(step: Step) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model = Net().double().cuda()
        opt = torch.optim.Adafactor(model.parameters(), lr=1e-2, foreach=foreach)
        found = [step(model, opt, *batch(number, 12), 0) for number in range(8)]
        return found, list(model.parameters())

    step = ws.compile(returns_a_number, backend="inductor")
    close(run(step), run(returns_a_number))
    assert step.explain().backend.startswith("inductor, 2 CUDA graphs, cut where"), step.explain().backend
    notes = [note for record in step.program().history for note in record.notes]
    assert any("numbers of the GPU in 2 rounds, and not in" in note or "in 1 rounds" in note for note in notes), notes
