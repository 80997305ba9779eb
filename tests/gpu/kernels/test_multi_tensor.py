"""Updates by kernels over lists, on a GPU: against eager optimizers in float64, under a CUDA graph and without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import wholestep as ws
from tests.gpu.test_inductor import OPTIMIZERS, batch
from tests.gpu.test_inductor import Net as Small
from tests.unit.lower.foreach.test_optimizer_loops import POINTWISE, Looped, Update, net
from tests.unit.lower.foreach.test_optimizer_loops import train_step as looped_step
from tests.unit.lower.inductor.test_segment_compiler import TOLERANCE, train_step

pytestmark = pytest.mark.gpu

STEPS = 20
SHAPES = [(3, 5), (0,), (1,), (), (9223,), (2, 1024), (70_001,), (4, 3, 3, 3), (13,)]
BACKENDS = {"graph": ws.Inductor(), "no graph": ws.Inductor(cuda_graph=False)}


class Odd(nn.Module):
    """Parameters of all sizes: empty, one number, more than a program's, no multiple of 16 bytes, channels last."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        made = [torch.randn(shape, generator=draw, dtype=torch.float64).cuda() for shape in SHAPES]
        made = [one.to(memory_format=torch.channels_last) if one.ndim == 4 else one for one in made]
        self.all = nn.ParameterList(map(nn.Parameter, made))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((one - x) ** 2).sum() * (place + 1) for place, one in enumerate(self.all))  # type: ignore[return-value]


def odd_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 50.0)
    opt.step()
    opt.zero_grad()
    return loss.detach()


def train_odd(kind: str, step: Callable[..., Tensor], move: Callable[[int, nn.Module], None]) -> dict[str, Tensor]:
    model = Odd()
    opt = OPTIMIZERS[kind](model.parameters())
    schedule = OneCycleLR(opt, 3e-2, total_steps=STEPS + 1)
    losses = []
    for number in range(STEPS):
        move(number, model)
        losses.append(step(model, opt, torch.tensor(0.1 * number, dtype=torch.float64, device="cuda")))
        schedule.step()
    return {"losses": torch.stack(losses), **{name: value.detach() for name, value in model.named_parameters()}}


def stay(number: int, model: nn.Module) -> None:
    """No parameter moves."""


def to_an_odd_place(number: int, model: nn.Module) -> None:
    """Moves parameters once the step is a graph, to addresses that are no multiples of 16 bytes."""
    if number in (8, 12):
        for one in model.parameters():
            room = torch.empty(one.numel() + 1, dtype=one.dtype, device="cuda")
            room = room[1:] if number == 8 else room[: one.numel()]
            one.data = room.as_strided(one.shape, one.stride(), room.storage_offset()).copy_(one.data)


@pytest.mark.parametrize("move", [stay, to_an_odd_place])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_foreach", "adamw_single", "sgd_fused", "sgd_foreach"])
def test_tensors_of_all_sizes_and_orders(kind: str, backend: str, move: Callable[[int, nn.Module], None]) -> None:
    step = ws.compile(odd_step, backend=BACKENDS[backend])
    found, wanted = train_odd(kind, step, move), train_odd(kind, odd_step, move)
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert ("one CUDA graph" in step.explain().backend) == (backend == "graph")
    notes = [note for record in step.program().history for note in record.notes]
    assert any("kernels over lists" in note for note in notes), notes
    assert not any("left to Inductor" in note for note in notes), notes


def device_events(step: Callable[[], Any]) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return [one.name for one in profile.events() if one.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("kind", ["adamw_fused", "adamw_single"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_kernel_updates_all_parameters(backend: str, kind: str) -> None:
    torch.manual_seed(0)
    model = Small().double().cuda()
    opt = OPTIMIZERS[kind](model.parameters())
    step = ws.compile(train_step, backend=BACKENDS[backend])
    for number in range(5):
        step(model, opt, *batch(number, 0))
    events = device_events(lambda: step(model, opt, *batch(5, 0)))
    counters = ["update_numbers"] if kind == "adamw_fused" else []  # a loop's lie on the host
    assert sorted(one for one in events if one in ("update_lists", "update_numbers")) == ["update_lists", *counters]
    if backend == "graph":  # the step's numbers come from the host, and no addresses
        x, y = batch(6, 0)
        copies = [one for one in device_events(lambda: step(model, opt, x, y)) if "HtoD" in one]
        assert len(copies) == 1, copies


@pytest.mark.parametrize("update", POINTWISE, ids=lambda update: update.__name__)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loop_of_the_users_own_is_one_kernel(backend: str, update: Update) -> None:
    found, events = [], list[str]()
    compiled = ws.compile(looped_step, backend=BACKENDS[backend])
    for step in (compiled, looped_step):
        model = net().cuda()
        opt = Looped(model.parameters(), update)
        losses = []
        for number in range(STEPS):
            opt.param_groups[0]["lr"] = 0.05 / (1 + number)
            x = torch.linspace(-1, 1, 24, dtype=torch.float64, device="cuda").reshape(4, 6) + number
            losses.append(step(model, opt, x))
        states = [value for one in model.parameters() for value in opt.state[one].values()]
        found.append([one.detach().clone() for one in (*losses, *model.parameters(), *states)])
        events = events or device_events(partial(step, model, opt, x))
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)
    assert events.count("update_lists") == 1, events


HALF = (0.5, 0.5)
"""Betas of which ``1 - beta ** step`` loses one bit. 0.999 loses ten, and how pow rounds shows."""
COUNTED_ON_DEVICE = 16 * 2.0**-24 * 1e-2 * STEPS
"""Counters and what becomes of them are float32 tensors there: roundings of that, times how far a parameter moves."""
LOOPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, betas=HALF, capturable=True, foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True, foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, betas=HALF, capturable=True, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, foreach=False),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True, foreach=False),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_loops_of_torchs_optimizers(kind: str) -> None:
    """With counters on the host and on the device (capturable)."""
    step = ws.compile(train_step, backend="inductor")
    found = []
    for call in (step, train_step):
        torch.manual_seed(0)
        model = Small().double().cuda()
        opt = LOOPS[kind](model.parameters())
        losses = [call(model, opt, *batch(number, 0)) for number in range(STEPS)]
        found.append([torch.stack(losses), *(value.detach().clone() for value in model.state_dict().values())])
        # The gradient of a bias before a batch norm is rounding alone, of terms below 1, divided by its own size
        # plus eps.
        noise = 2.0**-53 / opt.defaults.get("eps", 1.0) * opt.defaults["lr"] * STEPS
        tolerance = COUNTED_ON_DEVICE if opt.defaults.get("capturable") else max(TOLERANCE, noise)
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    notes = [note for record in step.program().history for note in record.notes]
    assert any("kernels over lists" in note for note in notes), notes
    assert not any("left to Inductor" in note for note in notes), notes


def test_two_signatures_have_tables_of_their_own() -> None:
    """Two graphs are alive, and each updates through addresses of its own."""
    found = []
    for step in (ws.compile(train_step, backend="inductor"), train_step):
        torch.manual_seed(0)
        model = Small().double().cuda()
        opt = OPTIMIZERS["adamw_fused"](model.parameters())
        losses = [step(model, opt, *batch(number, 0, 8 if number % 3 else 12)) for number in range(STEPS)]
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found, rtol=TOLERANCE, atol=TOLERANCE)


def test_more_elements_than_32_bits_count() -> None:
    def step(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> None:
        torch._foreach_mul_([a, b], 2.0)
        torch._foreach_add_([a, b], [x, y])

    count = 2**31 + 1001
    a, x = (torch.ones(count, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    b, y = torch.ones(7, device="cuda").bfloat16(), torch.ones(7, device="cuda").bfloat16()
    compiled = ws.compile(step, backend=ws.Inductor(cuda_graph=False))
    compiled(a, b, x, y)
    assert all(bool((one == 3).all()) for one in (a[-5000:], a[:5000], b))
    assert int((a != 3).sum()) == 0
    notes = [note for record in compiled.program().history for note in record.notes]
    assert any("2 tensors are updated by 1 kernels over lists" in note for note in notes), notes


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("kind", ["adamw_fused", "sgd_fused"])
def test_a_grad_scaler_goes_into_the_graph(kind: str, clips: bool) -> None:
    """Half of the losses in the middle are infinite: updates are left out, and the scale is halved."""

    def scaled_step(scaler: torch.amp.GradScaler) -> Callable[..., Tensor]:
        def step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
            loss = model(x)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            return loss.detach()

        return step

    found = []
    for backend in (ws.Inductor(), None):
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=4)
        step = scaled_step(scaler)
        run = step if backend is None else ws.compile(step, backend=backend)
        model = Odd()
        opt = OPTIMIZERS[kind](model.parameters())
        scales = []
        for number in range(STEPS):
            x = 0.1 * number if number not in (7, 9, 11) else float("inf")
            run(model, opt, torch.tensor(x, dtype=torch.float64, device="cuda"))
            scales.append(scaler.get_scale())
        found.append((scales, [one.detach() for one in model.parameters()]))
        if backend is not None:
            assert "one CUDA graph" in run.explain().backend
            notes = [note for record in run.program().history for note in record.notes]
            assert any("kernels over lists" in note for note in notes), notes
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=TOLERANCE, atol=TOLERANCE)
