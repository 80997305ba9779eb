"""verify: kernels that compute something else are found, with the operator and the line; rounding is none of that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
import wholestep.api.stages
from tests.behaviour.test_segments import Segmented
from wholestep.errors import VerificationError
from wholestep.ir.program import Program
from wholestep.ir.segment import Segment, segments_of
from wholestep.runtime.verify.kernel_check import NAME, _gap
from wholestep.runtime.verify.verification import Check, Outcome, Verification

Results = list[Any]
Fault = Callable[[Results, list[Any], Segment], None]


def nothing(results: Results, given: list[Any], segment: Segment) -> None: ...


def unwritten(results: Results, given: list[Any], segment: Segment) -> None:
    """The end of the first result is memory that nobody wrote."""
    first = next(one for one in results if one is not None and one.is_floating_point() and one.numel() > 1)
    first.view(-1)[-1] = -first.view(-1)[0] - 1


def not_stored(results: Results, given: list[Any], segment: Segment) -> None:
    """What is to be stored in an argument is not."""
    for argument, _ in segment.stored:
        given[argument].zero_()


def other_order(results: Results, given: list[Any], segment: Segment) -> None:
    """A few roundings, as of other kernels."""
    for one in results:
        if one is not None and one.is_floating_point():
            one.mul_(1 + 8 * torch.finfo(one.dtype).eps)


def other_shape(results: Results, given: list[Any], segment: Segment) -> None:
    results[0] = None if results[0] is None else results[0].flatten()[:1]


class Compiling(Segmented):
    """Compiles segments to themselves, with a fault."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault, self.calls = fault, 0

    def compile_segments(self, program: Program) -> Mapping[Segment, Callable[[list[Any]], Sequence[Any]]]:
        def compiled(segment: Segment) -> Callable[[list[Any]], Results]:
            def run(given: list[Any]) -> Results:
                self.calls += 1
                kept = list(given)
                results = segment(given)
                self.fault(results, kept, segment)
                return results

            return run

        return {one: compiled(one) for one in segments_of(program)}


def verified(fault: Fault, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Verification, Check, Compiling]:
    backend = Compiling(fault)
    monkeypatch.setattr(wholestep.api.stages, "backend_for", lambda *chosen: backend)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)

    @ws.compile(fullgraph=True, **options)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    before = [param.detach().clone() for param in model.parameters()]
    found = step.verify(torch.randn(8, 6), torch.randint(3, (8,)), ranks=2)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return found, next(one for one in found.checks if one.name == NAME), backend


@pytest.mark.parametrize("strategy", [None, ws.FSDP()])
@pytest.mark.parametrize("fault", [nothing, other_order])
def test_rounding_is_no_fault(fault: Fault, strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found, check, backend = verified(fault, monkeypatch, strategy=strategy)
    assert check.outcome is Outcome.PASSED, check
    assert found.ok
    assert backend.calls >= 2
    assert f"{backend.calls} segments" in check.text  # each is compared once


@pytest.mark.parametrize("fault", [unwritten, other_shape])
def test_other_numbers_are_found_with_their_operator(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    found, check, _ = verified(fault, monkeypatch)
    assert check.outcome is Outcome.FAILED
    assert check.difference is not None
    assert check.difference.source.startswith("test_kernel_check.py:")
    assert (check.difference.step, check.difference.rank) == (1, 0)
    with pytest.raises(VerificationError, match="compiled segment"):
        found.raise_if_failed()
    others = [one.outcome for one in found.checks if one.name != NAME]
    assert Outcome.FAILED not in others  # each segment runs on what operators have given


def test_what_a_segment_stores_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, check, _ = verified(not_stored, monkeypatch)
    assert check.outcome is Outcome.FAILED


def test_a_result_that_is_nothing_but_rounding_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of what has no influence: a bias before a softmax over it. Any order of additions gives other
    numbers."""

    def noisy(results: Results, given: list[Any], segment: Segment) -> None:
        for one in results:
            if one is not None and one.is_floating_point() and one.abs().max() < 1e-6:
                one.mul_(-1)

    backend = Compiling(noisy)
    monkeypatch.setattr(wholestep.api.stages, "backend_for", lambda *chosen: backend)
    shift = nn.Parameter(torch.zeros(()))

    @ws.compile(fullgraph=True)
    def step(x: Tensor) -> Tensor:
        loss = (x + shift).softmax(-1).square().sum()
        (grad,) = torch.autograd.grad(loss, [shift])
        return grad

    found = step.verify(torch.randn(64, 32), ranks=2, steps=1, whole_batch=False)
    (check,) = (one for one in found.checks if one.name == NAME)
    assert check.outcome is Outcome.PASSED, check


def test_a_backend_that_compiles_nothing_is_not_compared() -> None:
    model = nn.Linear(4, 2)
    step = ws.compile(lambda x: model(x).detach(), backend="eager", fullgraph=True)
    found = step.verify(torch.randn(4, 4), ranks=2, whole_batch=False)
    (check,) = (one for one in found.checks if one.name == NAME)
    assert (check.outcome, check.text) == (Outcome.SKIPPED, "nothing is compiled")


def test_inductor_computes_what_operators_do() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
    opt = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    @ws.compile(backend="inductor", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        opt.zero_grad()

    found = step.verify(torch.randn(8, 6), torch.randint(3, (8,)), ranks=2)
    (check,) = (one for one in found.checks if one.name == NAME)
    assert check.outcome is Outcome.PASSED, check
    assert found.ok


def test_an_element_that_moves_without_bound_allows_nothing() -> None:
    wanted, near, got = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0]), torch.tensor([1.0, 1.0, 5.0])
    assert _gap(wanted, near, got, 2.0**-23).is_fault
    assert not _gap(wanted, near, wanted, 2.0**-23).is_fault
