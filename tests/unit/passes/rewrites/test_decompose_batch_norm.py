"""Batch norms in training become operators that a compiler takes apart; their numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit import builders
from tests.unit.builders import aten
from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.ir.program import Program, Stage
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.decompose_batch_norm import decompose_batch_norm

PLAIN = aten._native_batch_norm_legit_functional.default
ATEN, CUDNN = (functional_twin(op.default, (3, 4)) for op in (aten.native_batch_norm, aten.cudnn_batch_norm))
CHANNELS = 5


def of_aten(x: Tensor, grad: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    y, *saved, new_mean, new_var = ATEN(x, w, b, mean, var, True, 0.1, 1e-5)
    back = aten.native_batch_norm_backward(grad, x, w, mean, var, *saved, True, 1e-5, [True] * 3)
    return y, *back, new_mean, new_var


def of_cudnn(x: Tensor, grad: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    y, *saved, reserve, new_mean, new_var = CUDNN(x, w, b, mean, var, True, 0.1, 1e-5)
    back = aten.cudnn_batch_norm_backward(x, grad, w, mean, var, *saved, 1e-5, reserve)
    return y, *back, new_mean, new_var


def reserve_kept(x: Tensor, grad: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    return of_cudnn(x, grad, w, b, mean, var)[0], CUDNN(x, w, b, mean, var, True, 0.1, 1e-5)[3]


def tensors(form: torch.memory_format = torch.contiguous_format, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    images = [torch.randn(4, CHANNELS, 6, 6, dtype=dtype).to(memory_format=form) for _ in range(2)]
    return [*images, *(torch.rand(CHANNELS) + 0.5 for _ in range(4))]


def rewritten(before: Program) -> Program:
    return run_passes(builders.without_gradients(before), [decompose_batch_norm])


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_backward_and_running_statistics_stay(form: torch.memory_format, dtype: torch.dtype) -> None:
    given = tensors(form, dtype)
    if dtype is torch.float64:
        given = [one.double() for one in given]
    before = builders.capture(of_aten, given)
    assert builders.count(before, ATEN) == 1
    after = rewritten(before)
    assert (builders.count(after, ATEN), builders.count(after, PLAIN)) == (0, 1)
    assert after.history[-1].notes == ("1 batch norms are written out for the compiler",)
    wanted, found = (builders.execute(one, given)[0] for one in (before, after))
    assert builders.same(wanted, found)  # ATen runs the same kernels for both


def test_cudnn_becomes_atens_form_with_its_backward() -> None:
    given = tensors()
    before = builders.capture(of_cudnn, given)
    assert builders.count(before, CUDNN, aten.cudnn_batch_norm_backward.default) == 2
    after = rewritten(before)
    assert builders.count(after, CUDNN, aten.cudnn_batch_norm_backward.default) == 0
    assert builders.count(after, PLAIN, aten.native_batch_norm_backward.default) == 2
    wanted = builders.execute(builders.capture(of_aten, given), given)[0]
    assert builders.same(wanted, builders.execute(after, given)[0])


def test_a_reserve_that_somebody_else_reads_is_cudnns() -> None:
    after = rewritten(builders.capture(reserve_kept, tensors()))
    assert (builders.count(after, CUDNN), builders.count(after, PLAIN)) == (1, 1)


def test_evaluation_and_norms_without_statistics_have_no_twin() -> None:
    given = tensors()
    before = builders.capture(lambda x, grad, w, b, mean, var: nn.functional.batch_norm(x, mean, var, w, b), given)
    assert rewritten(before).history[-1].notes == ()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(backend: str | None) -> tuple[list[Tensor], list[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Conv2d(CHANNELS, 2, 3)
    ).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = step if backend is None else ws.compile(step, backend=backend)
    losses = [run(model, optimizer, torch.randn(4, 3, 8, 8, dtype=torch.float64)) for _ in range(5)]
    notes: list[str] = []
    if backend is not None:
        notes = [note for record in run.program(Stage.SCHEDULED).history for note in record.notes]
    return [*losses, *model.state_dict().values()], notes


def test_a_network_trains_as_in_eager_code_and_its_norms_are_compiled() -> None:
    (wanted, _), (found, notes) = train(None), train("inductor")
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert "1 batch norms are written out for the compiler" in notes
    assert not any("native_batch_norm" in note for note in notes if "on their own" in note)
