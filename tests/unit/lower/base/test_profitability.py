"""Whether compiled kernels pay, on plain numbers and on small programs; what `backend="auto"` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.unit import builders
from wholestep.api.stages import Stages
from wholestep.cost.cost_model import CostModel
from wholestep.cost.curve import Curve
from wholestep.lower.auto_backend import AutoBackend, backend_for
from wholestep.lower.base.eager_backend import EagerBackend
from wholestep.lower.base.profitability import saved_share
from wholestep.lower.inductor import compile_fx, segment_compiler
from wholestep.lower.inductor_backend import InductorBackend
from wholestep.runtime.distributed.blob_store import BlobStore
from wholestep.runtime.distributed.store import HashStore

COST = CostModel.default("cpu+gloo")
CALIBRATED = replace(COST, source="calibrated on this host at 2026-01-01 00:00 (cpu)")
CPU = torch.device("cpu")


def lowered(inputs: list[Any]) -> tuple[Any, ...]:
    """What a backend might have given."""
    return ()


def many(x: Tensor) -> Tensor:
    for _ in range(20):
        x = (x + 1).tanh()
    return x


def product(x: Tensor) -> Tensor:
    return x @ x


def share_of(fn: Callable[..., Any], *shape: int) -> float:
    program = builders.capture(fn, [torch.empty(shape)])
    return saved_share(program, COST, compiles=segment_compiler.compiles)


def test_small_calls_are_saved_and_products_are_not() -> None:
    assert share_of(many, 8, 8) > 0.8
    assert share_of(product, 512, 512) == 0.0
    assert share_of(lambda x: x.view(-1), 512, 512) == 1.0


def test_products_are_saved_where_another_library_was_measured_to_be_faster() -> None:
    twice = Curve(points=tuple((2 * amount, us) for amount, us in COST.device.curves["matmul/float32"].points))
    device = replace(COST.device, curves={**COST.device.curves, "tuned_matmul/float32": twice})
    program = builders.capture(product, [torch.empty(512, 512)])
    share = saved_share(program, replace(COST, device=device), compiles=segment_compiler.compiles)
    assert share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("tunes", [True, False])
def test_plans_of_a_compiler_count_on_the_library_that_it_will_choose(tunes: bool) -> None:
    slower = COST.device.curves["softmax"]
    cost = replace(COST, device=replace(COST.device, curves={**COST.device.curves, "tuned_function": slower}))
    planned = InductorBackend(ws.Inductor(tune_products=tunes), CPU).costs(cost)
    assert (planned.device.curves["function"] == slower) == tunes


def test_what_stays_inside_a_kernel_is_saved() -> None:
    def chain(x: Tensor) -> Tensor:
        return (x + 1) * 2 - 3

    assert share_of(chain, 1000, 1000) == pytest.approx(2 / 3, rel=0.01)


def auto(monkeypatch: pytest.MonkeyPatch, cost: CostModel, *, others: str = "", cannot: str = "") -> AutoBackend:
    """After the plan of a step of many small calls. `others` is what another rank says."""
    monkeypatch.setattr(segment_compiler, "why_not", lambda device: cannot)
    chosen = AutoBackend(CPU, lambda: cost, lambda own: own or others)
    chosen.passes(builders.capture(many, [torch.empty(8, 8)]))
    return chosen


def test_without_a_calibration_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = auto(monkeypatch, COST)
    assert isinstance(chosen._backend, EagerBackend)
    assert "eager (auto: this host is not calibrated" in chosen.execution_mode(lowered).description


def test_a_calibration_that_says_so_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = auto(monkeypatch, CALIBRATED)
    assert isinstance(chosen._backend, InductorBackend)
    assert "(auto: compiled kernels would take " in chosen.execution_mode(lowered).description


def test_what_does_not_pay_runs_as_it_is() -> None:
    chosen = AutoBackend(CPU, lambda: CALIBRATED, lambda own: own)
    chosen.passes(builders.capture(product, [torch.empty(512, 512)]))
    assert (
        chosen.execution_mode(lowered).description == "eager (auto: compiled kernels would take 0% off the computation)"
    )


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = auto(monkeypatch, CALIBRATED)
    passes = chosen.passes(builders.capture(product, [torch.empty(512, 512)]))  # another signature
    assert isinstance(chosen._backend, InductorBackend)
    assert passes


@pytest.mark.parametrize(
    "who", [{"others": "rank 1: there is no C++ compiler"}, {"cannot": "there is no C++ compiler"}]
)
def test_one_rank_that_cannot_compile_is_enough(monkeypatch: pytest.MonkeyPatch, who: dict[str, str]) -> None:
    chosen = auto(monkeypatch, CALIBRATED, **who)
    assert isinstance(chosen._backend, EagerBackend)
    assert "there is no C++ compiler" in chosen.execution_mode(lowered).description


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise segment_compiler.InvalidCxxCompiler

    assert segment_compiler.why_not(CPU) == ""
    monkeypatch.setattr(segment_compiler, "get_cpp_compiler", none)
    assert "no C++ compiler" in segment_compiler.why_not(CPU)


def test_explain_tells_the_choice() -> None:
    step = ws.compile(lambda x: x * 2)
    step(torch.ones(2))
    assert "eager (auto: this host is not calibrated" in step.explain().backend


@pytest.mark.parametrize("wrong", [True, 0, "yes"])
def test_cuda_graph_is_auto_or_off(wrong: Any) -> None:
    assert ws.Inductor().cuda_graph == "auto"
    assert ws.Inductor(cuda_graph=False).cuda_graph is False
    with pytest.raises(ws.ConfigError, match="cuda_graph"):
        ws.Inductor(cuda_graph=wrong)


@pytest.mark.parametrize(("device", "started"), [("cuda", 2), ("cpu", 0)])
def test_workers_for_kernels_of_gpus_start_early(device: str, started: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(compile_fx.async_compile, "maybe_warm_pool", lambda: calls.append("started"))
    where = torch.device(device)
    for one in (InductorBackend(ws.Inductor(), where), AutoBackend(where, lambda: COST, lambda own: own)):
        one.prepare()
    assert len(calls) == started


@pytest.mark.parametrize("backend", ["inductor", "auto"])
def test_only_the_rank_that_compiles_starts_them(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    for rank in range(3):
        monkeypatch.setattr(compile_fx.async_compile, "maybe_warm_pool", lambda rank=rank: calls.append(rank))
        blob_store = BlobStore(HashStore(), "train_step/0", rank=rank, size=3)
        where = torch.device("cuda", rank)
        backend_for(backend, where, lambda: COST, lambda own: own, blob_store).prepare()
    assert calls == [0]


def test_the_backend_prepares_before_the_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    capture = Stages.capture

    def watched(self: Stages, *given: Any) -> Any:
        order.append("capture")
        return capture(self, *given)

    monkeypatch.setattr(EagerBackend, "prepare", lambda self: order.append("prepare"))
    monkeypatch.setattr(Stages, "capture", watched)
    ws.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert order == ["prepare", "capture"]
