"""Compiled steps on CUDA: one GPU against eager PyTorch, two GPUs with NCCL against eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import swa_utils

import wholestep as ws
from tests.gpu.switches import deterministic
from tests.harness.rank_pools import needs_gpus
from wholestep.ir.program import InputKind

pytestmark = pytest.mark.gpu

STEPS = 4

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "adamw_single": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Convolution, batch norm, attention and dropout in one small model."""

    def __init__(self) -> None:
        super().__init__()
        # No bias: before a batch norm its gradient is rounding noise, which Adam blows up.
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.conv(x)))
        with sdpa_kernel(SDPBackend.MATH):  # the others add in an order of their own at every run
            mixed = self.block(h.flatten(2).transpose(1, 2))
        return self.head(mixed.mean(1))


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, clip: bool = True) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    return loss


def build(optimizer: str, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net().to(device)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(number: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * number + rank)
    x, y = torch.randn(6, 3, 4, 4, generator=generator), torch.randint(5, (6,), generator=generator)
    return x.to(device), y.to(device)


def train(optimizer: str, rank: int, device: torch.device, how: str, *, clip: bool = True) -> dict[str, Tensor]:
    """State and losses after a few steps: ``eager``, ``ddp`` (eager) or ``compiled``."""
    with torch.backends.cudnn.flags(enabled=True, deterministic=True), deterministic():
        return _train(optimizer, rank, device, how, clip=clip)


def _train(optimizer: str, rank: int, device: torch.device, how: str, *, clip: bool) -> dict[str, Tensor]:
    model, opt = build(optimizer, device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index]) if how == "ddp" else model
    step = ws.compile(train_step, backend="eager") if how == "compiled" else train_step
    seen: dict[str, Tensor] = {}
    for number in range(STEPS):
        torch.manual_seed(number + 10 * rank)
        seen[f"loss.{number}"] = step(wrapped, opt, *batch(number, rank, device), clip).detach().cpu()
    if how == "compiled":
        assert step.cache_info().traces == 1
    return seen | {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    return {name: (a[name] - b[name]).abs().max().item() for name in a if not torch.equal(a[name], b[name])}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_gpu_equals_eager(optimizer: str) -> None:
    device = torch.device("cuda", 0)
    assert differences(train(optimizer, 0, device, "eager"), train(optimizer, 0, device, "compiled")) == {}


def _on_rank(optimizer: str) -> dict[str, float]:
    world = ws.init()
    torch.cuda.set_device(world.device)
    # No clipping: gradients are views of a bucket, and the kernel of the norm adds in another order where a
    # view does not start on 16 bytes, so the norm may differ in its last bit.
    ddp, ours = (train(optimizer, world.rank, world.device, how, clip=False) for how in ("ddp", "compiled"))
    return differences(ddp, ours)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_gpus_equal_eager_ddp(optimizer: str) -> None:
    needs_gpus(2)
    assert ws.run(_on_rank, 2, optimizer) == [{}, {}]


def averaging(backend: Any, rank: int, device: torch.device, how: str) -> dict[str, Tensor]:
    """Like `train`, with a moving average of the weights, whose counter is on the CPU, in the step."""
    model, opt = build("adamw_fused", device)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    wrapped = DistributedDataParallel(model, device_ids=[device.index]) if how == "ddp" else model

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(wrapped, opt, x, y, clip=False)
        average.update_parameters(model)
        return loss

    run = ws.compile(step, backend=backend) if how == "compiled" else step
    for number in range(STEPS):
        torch.manual_seed(number + 10 * rank)
        run(*batch(number, rank, device))
    if how == "compiled":
        info = run.cache_info()  # type: ignore[attr-defined]
        assert (info.traces, info.hits) == (2, STEPS - 2)  # weights are copied in the first call
        graphed = run.explain().backend.endswith("one CUDA graph")  # type: ignore[attr-defined]
        assert graphed == (backend == "inductor")
    assert average.n_averaged == STEPS
    assert average.n_averaged.device.type == "cpu"
    return {name: tensor.cpu() for name, tensor in average.state_dict().items()}


def _averages(on_ranks: bool) -> dict[str, float]:
    world = ws.init() if on_ranks else None
    rank, device = (world.rank, world.device) if world is not None else (0, torch.device("cuda", 0))
    torch.cuda.set_device(device)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True), deterministic():
        wanted = averaging("eager", rank, device, "ddp" if on_ranks else "eager")
        found = averaging("eager", rank, device, "compiled")
        averaging("inductor", rank, device, "compiled")
    return differences(wanted, found)


def test_a_counter_on_the_cpu_is_counted_there() -> None:
    assert _averages(False) == {}


def test_no_rank_sends_a_counter_on_its_cpu() -> None:
    """NCCL could not."""
    needs_gpus(2)
    assert ws.run(_averages, 2, True) == [{}, {}]


def test_an_update_copies_no_parameter() -> None:
    device = torch.device("cuda", 0)
    model, opt = build("adamw_fused", device)
    step = ws.compile(train_step, backend="eager")
    addresses = [p.data_ptr() for p in model.parameters()]
    for number in range(2):
        step(model, opt, *batch(number, 0, device))
    assert addresses == [p.data_ptr() for p in model.parameters()]
    program = step.program()
    kinds = {node: record.kind for node, record in zip(program.placeholders, program.inputs, strict=True)}
    copied = [
        kinds[target]
        for node in program.graph.nodes
        if "copy_" in str(node.target)
        for target in (node.args[0] if isinstance(node.args[0], list) else [node.args[0]])
    ]
    assert copied, "the running statistics of the batch norm are copied at the end"
    assert set(copied) == {InputKind.BUFFER}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_several_updates_in_one_call(optimizer: str, backend: Any) -> None:
    """As reinforcement learning has them: the step counters of every update are its own."""
    device = torch.device("cuda", 0)

    def rounds(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
        for part in x.chunk(4):
            opt.zero_grad()
            loss = (model(part) - 1).square().mean()
            loss.backward()
            opt.step()
        return loss.detach()

    found: list[list[Tensor]] = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        opt = OPTIMIZERS[optimizer](model.parameters())
        run: Any = ws.compile(rounds, backend=backend) if compiled else rounds
        generator = torch.Generator(device).manual_seed(1)
        losses = [run(model, opt, torch.randn(32, 8, device=device, generator=generator)) for _ in range(STEPS)]
        found.append([*losses, *(one.detach() for one in model.parameters())])
    for wanted, one in zip(*found, strict=True):
        torch.testing.assert_close(
            one, wanted, rtol=0 if backend == "eager" else 1e-4, atol=0 if backend == "eager" else 1e-6
        )
