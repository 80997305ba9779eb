"""Strides of fake tensors are those of a GPU's kernels; mixtures of experts; Muon."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

import wholestep as ws
from tests.unit.capture.tracing.test_fake_kernels import IMAGES, PAIRS, Experts
from wholestep.capture.tracing.fake_kernels import LayoutFakeMode

pytestmark = pytest.mark.gpu

SHAPE = (2, 3, 4, 5)
aten = torch.ops.aten


def layouts() -> Iterator[Tensor]:
    for order in itertools.permutations(range(len(SHAPE))):
        made = torch.randn([SHAPE[axis] for axis in order], device="cuda")
        yield made.permute([order.index(axis) for axis in range(len(SHAPE))])


@pytest.mark.parametrize("row", [*PAIRS, *IMAGES], ids=lambda row: str(row[0]))
def test_a_fake_has_the_strides_of_the_real_one(row: Any) -> None:
    operator, arguments = row
    compared = 0
    for x in layouts():
        other = torch.randn(SHAPE, device="cuda")
        for pair in ((x, other), (other, x)):
            args = tree_map_only(Tensor, Tensor.cuda, arguments(*pair))
            try:
                real = operator(*args)
            except RuntimeError:  # refused by the kernel in this layout: autograd copies for it
                args = tree_map_only(Tensor, Tensor.contiguous, args)
                real = operator(*args)
            mode = LayoutFakeMode()
            fakes = tree_map_only(Tensor, mode.from_tensor, args)
            with mode:
                made = operator(*fakes)
            fake, real = (made, real) if isinstance(real, Tensor) else (made[0], real[0])
            sized = [place for place, size in enumerate(real.shape) if size > 1]
            assert [fake.stride()[place] for place in sized] == [real.stride()[place] for place in sized], x.stride()
            compared += 1
    assert compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_mixture_of_experts(dtype: torch.dtype) -> None:
    """In one CUDA graph in bfloat16; ATen asks the GPU for the ends of groups in float32, and the step says so."""
    torch.manual_seed(0)
    model = Experts().to("cuda", dtype)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        loss = model(x).float().square().mean()
        loss.backward()
        found = loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)
        opt.step()
        opt.zero_grad()
        return found

    state = {name: one.clone() for name, one in model.state_dict().items()}
    batches = [torch.randn(4, 16, 8, device="cuda", dtype=dtype) for _ in range(4)]
    wanted = [step(x) for x in batches]
    model.load_state_dict(state)
    run = ws.compile(step, backend="inductor")
    for x, want in zip(batches, wanted, strict=True):
        for one, other in zip(run(x), want, strict=True):
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * other.abs().max().item())
    backend = run.explain().backend
    assert ("one CUDA graph" in backend) == (dtype is torch.bfloat16)
    assert ("asks the GPU where groups end" in backend) == (dtype is torch.float32)


def test_muon_is_in_one_graph_and_its_rate_moves() -> None:
    def train(compiled: bool) -> tuple[list[Tensor], str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 8, bias=False)).cuda()
        opt = torch.optim.Muon(model.parameters(), lr=0.05)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            return loss.detach()

        run: Any = ws.compile(step, backend="inductor") if compiled else step
        losses = []
        for _ in range(6):
            losses.append(run(torch.randn(12, 16, device="cuda")).clone())
            opt.param_groups[0]["lr"] *= 0.7
        return losses, run.explain().backend if compiled else ""

    wanted, _ = train(compiled=False)
    found, backend = train(compiled=True)
    assert "one CUDA graph" in backend
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)  # products of Muon are in bfloat16


@pytest.mark.parametrize("channels", [3, 32])
@pytest.mark.parametrize("last", [False, True])
def test_linear_interpolation_is_gathered(channels: int, last: bool) -> None:
    form = torch.channels_last if last else torch.contiguous_format
    conv = nn.Conv2d(4, channels, 1).cuda().to(memory_format=form)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        large = functional.interpolate(conv(x), size=(24, 20), mode="bilinear")
        loss = functional.interpolate(large, scale_factor=2.0, mode="bilinear", align_corners=True).square().mean()
        return loss, *torch.autograd.grad(loss, list(conv.parameters()))

    run = ws.compile(step, backend="inductor")
    x = torch.randn(2, 4, 6, 5, device="cuda").to(memory_format=form)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for _ in range(3):
            for found, wanted in zip(run(x), step(x), strict=True):
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(x)
        torch.cuda.synchronize()
    assert not [one.name for one in profile.events() if "upsample_bilinear" in one.name and "triton" not in one.name]


class Head(nn.Module):
    """A hand-written GELU before a norm of 128 columns, which Triton 3.6 compiles with some block sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm, self.out = nn.Linear(256, 128), nn.LayerNorm(128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dense(x)
        h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3.0))))
        found: Tensor = self.out(self.norm(h))
        return found


def test_a_kernel_that_triton_cannot_compile_with_all_sizes() -> None:
    torch.manual_seed(0)
    model = Head().cuda()

    def step(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    x = torch.randn(16, 512, 256, device="cuda")
    run = ws.compile(step, backend="inductor")
    for found, wanted in zip(run(x), step(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2 * wanted.abs().max().item())


SAMPLES = {
    "gamma": torch._standard_gamma,
    "dirichlet": torch._sample_dirichlet,
    "binomial": lambda rates: torch.binomial(10 * rates, 0 * rates + 0.5),
    "poisson": torch.poisson,
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_draw_that_runs_to_be_described_leaves_the_generator(name: str) -> None:
    """In the first trace of a process: torch remembers what it has run for its description."""
    rates = torch.rand(7 + len(name), 11, device="cuda")

    def step(x: Tensor) -> Tensor:
        return SAMPLES[name](rates) * x

    found = []
    for run in (step, ws.compile(step, backend="eager")):
        torch.manual_seed(5)
        found.append(torch.stack([run(torch.ones(11, device="cuda")) for _ in range(3)]))
    assert torch.equal(*found)
