"""Inductor compiles a step whose batches have other sizes in each call once for all sizes of a trace.

Adam makes large steps of small differences, so parameters are compared under SGD.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.behaviour.harness import Compiled, EagerDDP, Run, compare
from tests.behaviour.moving_sizes.loops import CLASSES, LOOPS, WIDTH
from wholestep.ir import node_meta
from wholestep.ir.segment import Segment
from wholestep.lower.inductor import compile_fx, segment_sizes

F = nn.functional


class FewCalls(Run):
    """Eager code, a few times."""

    calls = 8
    optimizer = torch.optim.SGD


class FewCompiled(Compiled):
    """Compiled code, as often."""

    calls = 8
    optimizer = torch.optim.SGD


def noting(patch: pytest.MonkeyPatch) -> list[Segment]:
    """The segments that are compiled from now on, as it happens."""
    found: list[Segment] = []
    begin = compile_fx.begin_compile

    def begun(segment: Segment, **options: Any) -> Any:
        found.append(segment)
        return begin(segment, **options)

    patch.setattr(compile_fx, "begin_compile", begun)
    return found


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    return noting(monkeypatch)


@pytest.mark.slow  # as Inductor compiles
@pytest.mark.parametrize("name", ["lengths", "slices_of_a_batch", "image_sizes", "graphs_with_train_masks"])
def test_equals_eager_code(name: str, begun: list[Segment]) -> None:
    case, compiled = LOOPS.cases[name], FewCompiled("inductor")
    found = compare(case, FewCalls(), compiled, rounds=True)
    assert not found, "\n".join(found)
    assert compiled.traces <= max(case.traces)
    assert any(segment.symbols for segment in begun)
    assert not [node for segment in begun for node in segment.calls if isinstance(node_meta.value(node), torch.SymInt)]


class FewCallsDDP(EagerDDP):
    """DistributedDataParallel, a few times."""

    calls = 8
    optimizer = torch.optim.SGD


def complaints(name: str) -> tuple[list[str], int]:
    """What differs from eager code on this rank, and how many segments it has compiled for sizes that move."""
    with pytest.MonkeyPatch.context() as patch:
        begun = noting(patch)
        try:
            found = compare(LOOPS.cases[name], FewCallsDDP(), FewCompiled("inductor"), rounds=True)
        except ws.WholestepError as error:  # told in words, so that ranks stay usable
            found = [f"{type(error).__name__}: {error}"]
    return found, sum(bool(segment.symbols) for segment in begun)


@pytest.mark.ranks
def test_ranks_with_other_sizes_run_what_one_has_compiled(pool2: Any) -> None:
    (found, begun), (other, begun_there) = pool2.run(complaints, "graphs_with_weights")
    assert not found, found
    assert not other, other
    assert (begun > 0) + (begun_there > 0) == 1, (begun, begun_there)


def perceptron() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, step


def losses_apart(step: Any, eager: Any, rows: int) -> float:
    """How far the losses of a batch are from each other, as a share."""
    numbers = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, WIDTH, generator=numbers), torch.randint(CLASSES, (rows,), generator=numbers)
    want = eager(x, y)
    return float((step(x, y) - want).abs() / want)


CLOSE = 2**5 * torch.finfo(torch.float32).eps


def test_sizes_compile_nothing_and_long_sums_are_a_trace_of_their_own(begun: list[Segment]) -> None:
    """Sums over more than 4,096 rows are compensated, which kernels for fewer do not do."""
    (model, eager), (twin, step) = perceptron(), perceptron()
    compiled = ws.compile(step, backend="inductor", fullgraph=True)
    counts = []
    for rows in (8, 9, 13, 5, 300, 4096, 5000, 6001, 7, 4097):
        assert losses_apart(compiled, eager, rows) < CLOSE
        counts.append((compiled.cache_info().traces, len(begun)))
    assert counts[1:6] == counts[1:2] * 5
    assert counts[6:] == counts[6:7] * 4
    assert counts[-1][0] == 3
    assert "4096" in compiled.cache_info().reasons[-1]
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, one, rtol=CLOSE, atol=CLOSE)


def test_a_segment_for_one_size_alone_runs_call_by_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: segment_sizes.SegmentSizes) -> list[Any]:
        raise segment_sizes.NotForAllSizes("a size has to be 9")

    (_, eager), (_, step) = perceptron(), perceptron()
    monkeypatch.setattr(segment_sizes.SegmentSizes, "inputs", refuse)
    compiled = ws.compile(step, backend="inductor", fullgraph=True, dynamic=True)
    with caplog.at_level(logging.WARNING, logger="wholestep"):
        assert all(losses_apart(compiled, eager, rows) < CLOSE for rows in (9, 12, 4))
    assert compiled.cache_info().traces == 1
    assert "its calls run one by one: a size has to be 9" in caplog.text
