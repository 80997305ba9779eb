"""Which library multiplies on the CPU: what is timed, what is chosen, and what Inductor writes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

import wholestep as ws
from tests.unit.lower.gemm.processor import NEEDS_ONEDNN
from wholestep.lower.gemm import cpu_matmul, onednn

aten = torch.ops.aten
TOLERANCE = 1e-5
"""Sums of up to 600 float32 products in another order: 600 * 2^-24 = 3.6e-5 at most, mostly a hundredth of it."""


def targets(fn: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Any]:
    """What the products of `fn` are after a choice in which oneDNN is always faster."""
    graph = make_fx(fn, tracing_mode="fake")(*(torch.empty(shape, dtype=dtype) for shape in shapes)).graph
    with patch.object(cpu_matmul, "_is_faster", lambda node: True):
        count = cpu_matmul.choose(graph)
    found = [node.target for node in graph.find_nodes(op="call_function", target=onednn.PRODUCT.default)]
    found += graph.find_nodes(op="call_function", target=onednn.PRODUCT_ADD.default)
    assert len(found) == count
    return [getattr(one, "target", one) for one in found]


@NEEDS_ONEDNN
def test_products_of_float32_matrices_and_batches_go():
    assert targets(torch.mm, (128, 64), (64, 128)) == [onednn.PRODUCT.default]
    assert targets(torch.bmm, (4, 128, 64), (4, 64, 128)) == [onednn.PRODUCT.default]
    assert targets(torch.addmm, (128,), (128, 64), (64, 128)) == [onednn.PRODUCT_ADD.default]


@pytest.mark.parametrize(
    "given",
    [
        lambda: targets(torch.mm, (8, 8), (8, 8)),
        lambda: targets(torch.mm, (128, 64), (64, 128), dtype=torch.float64),
        lambda: targets(torch.mm, (128, 64), (64, 128), dtype=torch.bfloat16),
        lambda: targets(lambda c, a, b: torch.addmm(c, a, b, alpha=2), (128,), (128, 64), (64, 128)),
        lambda: targets(lambda c, a, b: torch.addmm(c, a, b, beta=0.5), (128,), (128, 64), (64, 128)),
        lambda: targets(torch.mv, (1024, 1024), (1024,)),
    ],
    ids=["small", "float64", "bfloat16", "alpha", "beta", "a vector"],
)
def test_all_else_stays_with_torch(given):
    assert given() == []


@NEEDS_ONEDNN
@pytest.mark.parametrize(("ours_us", "goes"), [(94.0, True), (96.0, False), (200.0, False)])
def test_the_faster_one_is_taken_if_it_gains_enough(monkeypatch, ours_us, goes):
    monkeypatch.setattr(cpu_matmul, "_times_us", lambda runs: {"torch": 100.0, "oneDNN": ours_us})
    cpu_matmul._gains.cache_clear()
    try:
        graph = make_fx(torch.mm, tracing_mode="fake")(torch.empty(128, 64), torch.empty(64, 128)).graph
        assert cpu_matmul.choose(graph) == goes
    finally:
        cpu_matmul._gains.cache_clear()


def test_both_are_timed_on_operands_of_that_layout(monkeypatch):
    seen: dict[str, list[Tensor]] = {}

    def times(runs: dict[str, Any]) -> dict[str, float]:
        for name, run in runs.items():
            run()
            seen[name] = [*run.args, run.keywords["out"]]
        return dict.fromkeys(runs, 1.0)

    monkeypatch.setattr(cpu_matmul, "_times_us", times)
    cpu_matmul._gains.cache_clear()
    operands = [torch.empty(7), torch.empty(10, 9)[:, :5], torch.empty(7, 5).t()]
    cpu_matmul._gains(1, *(cpu_matmul._Operand(tuple(one.shape), one.stride()) for one in operands))
    assert set(seen) == {"torch", "oneDNN"}
    for given in seen.values():
        assert [one.stride() for one in given] == [*(one.stride() for one in operands), (7, 1)]
        torch.testing.assert_close(given[-1], torch.addmm(*given[:-1]))


def test_the_shortest_of_several_runs_counts():
    calls = {"torch": 0, "oneDNN": 0}

    def run(name: str) -> None:
        calls[name] += 1

    times = cpu_matmul._times_us({name: lambda name=name: run(name) for name in calls})
    assert set(calls.values()) == {1 + cpu_matmul._ROUNDS}
    assert all(0 <= us < 1e4 for us in times.values())


def train_step(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def trained(step: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(72, 96), nn.Tanh(), nn.Linear(96, 80, bias=False), nn.Tanh(), nn.Linear(80, 64))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(3):
        draw = torch.Generator().manual_seed(number)
        losses.append(step(model, opt, torch.randn(600, 72, generator=draw), torch.randn(600, 64, generator=draw)))
    return torch.stack(losses), model.state_dict()


def texts(step: ws.CompiledStep) -> str:
    return "\n".join(step._stages.backend._compiler.inductor.texts())


@NEEDS_ONEDNN
def test_a_compiled_step_multiplies_by_the_library_that_is_faster(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "_is_faster", lambda node: True)
    with fresh_cache():
        step = ws.compile(train_step, backend="inductor")
        found = trained(step)
        # Three products forward, one less for the gradients of inputs, and three for those of weights.
        assert texts(step).count("torch.ops.wholestep.product") == 8
        assert "out=" in next(line for line in texts(step).splitlines() if "wholestep.product.out" in line)
        assert "extern_kernels." not in texts(step)
        torch.testing.assert_close(found, trained(train_step), rtol=TOLERANCE, atol=TOLERANCE)
        assert step.cache_info().traces == 1


@pytest.mark.parametrize("why", ["option", "deterministic", "deterministic torch", "slower"])
def test_it_does_not_where_it_must_not(monkeypatch, why):
    monkeypatch.setattr(cpu_matmul, "_is_faster", lambda node: why != "slower")
    backend: Any = ws.Inductor(tune_products=False) if why == "option" else "inductor"
    if why == "deterministic torch":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with fresh_cache(), inductor_config.patch(deterministic=why == "deterministic"):
        step = ws.compile(train_step, backend=backend)
        trained(step)
        assert "wholestep.product" not in texts(step)
        assert texts(step).count("extern_kernels.") == 8


@NEEDS_ONEDNN
def test_batches_in_a_compiled_step(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "_is_faster", lambda node: True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.bmm(torch.softmax(torch.bmm(q, k.transpose(1, 2)) / 8, dim=-1), v) + 1

    given = [torch.randn(6, 72, 64, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    with fresh_cache():
        step = ws.compile(attend, backend="inductor")
        found = step(*given)
        assert texts(step).count("torch.ops.wholestep.product.out(") == 2
        torch.testing.assert_close(found, attend(*given), rtol=TOLERANCE, atol=TOLERANCE)
