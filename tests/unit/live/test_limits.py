"""What a live step takes of everyday objects, and where it stops to compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.live.both import Compiled, Step, Training, train_both, train_by_stages
from wholestep.live import run
from wholestep.live.live_step import LAUNCHES_EACH, MAX_COMPILED, LiveStep
from wholestep.live.opaque.modules import OpaqueModules

NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one": lambda loss: loss * np.float64(0.5), "two": lambda loss: loss * np.float64(0.5) * np.float32(2.0),
    "beside a constant": lambda loss: (loss.to(torch.float64) * np.sqrt(2.0)).float(),
    "an int": lambda loss: loss * np.int64(3),
}  # fmt: skip


@pytest.mark.parametrize("scale", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_numpy(scale: Callable[[Tensor], Tensor]) -> None:
    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            loss = scale(training.model(x).square().mean())
            training.notes.append(training.update(loss).item())
            return loss.detach()

        return step

    train_both(make)
    train_by_stages(make)


def test_layers_of_torch_compute_as_in_eager_code_from_the_first_call_on() -> None:
    """An encoder in evaluation has kernels of its own, but where a mode like ours is on."""

    def make(training: Training) -> Step:
        torch.manual_seed(1)
        teacher = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()

        def step(x: Tensor) -> Tensor:
            hidden = training.model.first(x)
            with torch.no_grad():
                wanted = teacher(hidden[None])[0]
            training.notes.append(wanted.tolist())
            return training.update((hidden - wanted).square().mean()).detach()

        return step

    train_both(make)


def test_a_module_called_in_two_ways_by_turns_is_captured_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state without a graph first, then one with."""
    captures: list[int] = []
    kept = OpaqueModules._captured

    def counted(*args: Any) -> Any:
        captures.append(0)
        return kept(*args)

    monkeypatch.setattr(OpaqueModules, "_captured", counted)

    def make(training: Training) -> Step:
        torch.manual_seed(1)
        cell = nn.Sequential(training.model.last, nn.Linear(1, 8), nn.Tanh())

        def step(x: Tensor) -> Tensor:
            hidden = torch.zeros(3, 8)
            for _ in range(20):  # more values than a way through a step has pieces
                hidden = cell(cell(hidden))
                training.notes.append(training.update(hidden.mean()).item())
                hidden = hidden.detach()
            return hidden

        return step

    train_both(make, calls=5)
    assert len(captures) == 2


def test_what_comes_after_the_last_piece_is_eager_code_of_which_nothing_is_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[Any] = []
    kept = run.observe

    def counted(*args: Any) -> Any:
        noted.append(args[0])
        return kept(*args)

    monkeypatch.setattr(run, "observe", counted)

    def make(training: Training) -> Step:
        def step(x: Tensor) -> Tensor:
            for _ in range(20):
                hidden = training.model.dropout(training.model.first(x))
                training.notes.append(training.update(training.model.last(hidden).mean()).item())
            noted.append("end of a call")
            return training.model.last(training.model.first(x)).detach()

        return step

    train_both(make, calls=6)
    assert noted[-3:] == ["end of a call"] * 3  # of eager code, and of two calls in which nothing was noted


def other_calls_each_time(training: Training) -> Step:
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(0)
        loss = training.model(x).square().mean()
        for bit in range(7):  # a way of its own for each call, and another one for the next one
            if len(calls) // 2 >> bit & 1:
                loss = loss + loss.item() * 0.0
            loss = loss * 1.5 if len(calls) // 2 >> bit & 1 else loss / 1.5
        return training.update(loss).detach()

    return step


def test_a_step_that_goes_other_ways_for_ever_is_not_compiled_for_ever() -> None:
    compiled = Compiled()
    step = LiveStep(other_calls_each_time(Training()), "step", "", compiled)
    for _ in range(160):
        step((torch.ones(3, 4),), {})
    assert len(compiled.pieces) == MAX_COMPILED
    assert compiled.launches < LAUNCHES_EACH * MAX_COMPILED
    assert any("too few run again for more to be compiled" in one for one in step.stats.reasons)


def test_numbers_in_lists_are_no_inputs_of_a_graph() -> None:
    """Each would be tried by a capture of its own: a batch of token ids would take minutes."""
    model = nn.Linear(4, 2)

    @ws.compile(backend="eager")
    def step(rows: list[list[float]]) -> Tensor:
        with torch.no_grad():
            return model(torch.tensor(rows)).sum()

    for call in range(3):
        rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(call)).tolist()
        with torch.no_grad():
            assert step(rows).item() == model(torch.tensor(rows)).sum().item()
    assert str(step.explain()).startswith("step: live")
    refused = ws.compile(step.__wrapped__, backend="eager", fullgraph=True)
    refused(torch.full((30, 4), 0.0).tolist())
    with pytest.raises(ws.CaptureError, match="120 numbers are others in later calls"):
        refused(torch.full((30, 4), 1.0).tolist())


def test_many_numbers_that_can_all_be_inputs_are() -> None:
    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor, weights: list[float]) -> Tensor:
        return sum((x * weight for weight in weights), x)

    for call in range(3):
        weights = [call + number / 64 for number in range(40)]
        assert torch.equal(step(torch.ones(2), weights), sum((torch.ones(2) * one for one in weights), torch.ones(2)))
    assert step.cache_info().traces == 2


def test_a_sparse_argument_of_another_layout_is_another_trace() -> None:
    weight = torch.randn(4, 2)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        return torch.sparse.mm(x, weight).sum()

    x = torch.eye(4) * 2
    for sparse in (x.to_sparse(), x.to_sparse_csr(), x.to_sparse(), x.to_sparse_csr()):
        assert step(sparse).item() == pytest.approx(weight.sum().item() * 2)
