"""The kernel that adds what has come, run by Triton's interpreter. Builds of torch for CPUs come without Triton."""

from __future__ import annotations

import pytest
import torch

from tests.unit.lower.streams import added
from wholestep.lower import addition

interpreter = pytest.importorskip("triton.runtime.interpreter")


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_adds_in_the_order_of_the_ranks(ranks: int, dtype: torch.dtype, averages: bool, monkeypatch):
    monkeypatch.setattr(addition, "_kernel", interpreter.InterpretedFunction(addition._add))
    for length in (0, 1, 31, 5000):
        memory = torch.randn(ranks, 6000).to(dtype)
        for rank in range(ranks):
            own, behind = torch.randn(length).to(dtype), memory[:, length:].clone()
            wanted, same = own.clone(), memory[:, :length].clone()
            added(same, wanted, rank=rank, averages=averages)
            addition.add_parts(memory[:, :length], own, rank=rank, averages=averages)
            torch.testing.assert_close(own, wanted)  # a mean of three is rounded in two ways
            assert torch.equal(own, memory[rank, :length])
            same[rank] = own
            assert torch.equal(memory, torch.cat([same, behind], dim=1)), "written to others, or behind the end"
