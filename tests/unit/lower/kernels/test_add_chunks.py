"""The kernel that adds what has come, run by Triton's interpreter. Builds of torch for CPUs come without Triton."""

from __future__ import annotations

import pytest
import torch

from tests.unit.lower.stream_simulator import added
from wholestep.lower.kernels import add_chunks

interpreter = pytest.importorskip("triton.runtime.interpreter")


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_adds_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype, averages: bool, monkeypatch):
    monkeypatch.setattr(add_chunks, "_kernel", interpreter.InterpretedFunction(add_chunks._add))
    for length in (0, 1, 31, 5000):
        memory = torch.randn(ranks, 6000).to(dtype)
        for rank in range(ranks):
            own, behind = torch.randn(length).to(dtype), memory[:, length:].clone()
            wanted, same = own.clone(), memory[:, :length].clone()
            added(same, wanted, wanted, same[rank], rank=rank, averages=averages)
            slots = memory[:, :length]
            add_chunks.add_parts(slots, own, own, slots[rank], rank=rank, averages=averages)
            torch.testing.assert_close(own, wanted)  # a mean of three is rounded in two ways
            assert torch.equal(own, memory[rank, :length])
            same[rank] = own
            assert torch.equal(memory, torch.cat([same, behind], dim=1)), "written to others, or past the end"


@pytest.mark.parametrize("averages", [False, True])
def test_half_precision_is_added_into_a_wider_result(averages: bool, monkeypatch):
    monkeypatch.setattr(add_chunks, "_kernel", interpreter.InterpretedFunction(add_chunks._add))
    slots, own = torch.randn(4, 6000).half()[:, :5000], torch.randn(5000).half()
    result, shared = torch.full((2, 6000), torch.nan).unbind()
    wanted, again, before = torch.empty(5000), torch.empty(5000), (slots.clone(), own.clone())
    added(slots, own, wanted, again, rank=2, averages=averages)
    add_chunks.add_parts(slots, own, result[:5000], shared[:5000], rank=2, averages=averages)
    assert torch.equal(result[:5000], wanted)
    assert torch.equal(shared[:5000], wanted)
    assert bool(result[5000:].isnan().all() and shared[5000:].isnan().all())
    assert all(map(torch.equal, (slots, own), before))
