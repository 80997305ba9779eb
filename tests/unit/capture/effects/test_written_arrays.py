"""Arrays that a step writes to after a read of tensors that lie on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wholestep as ws
from wholestep.errors import CaptureError


def overwrites(array: Any, x: Tensor) -> Tensor:
    found = x * torch.from_numpy(array)
    array[1] = 0.9
    return found


def overwrites_behind_a_mean(array: Any, x: Tensor) -> Tensor:
    found = x * torch.from_numpy(array).float().abs().mean()
    array[1] = 0.9
    return found


def counts(array: Any, x: Tensor) -> Tensor:
    found = (x * torch.from_numpy(array)).sum()
    array[1] += 1
    return found


def writes_first(array: Any, x: Tensor) -> Tensor:
    array[1] = 0.9
    return x * torch.from_numpy(array)


def between_two_reads(array: Any, x: Tensor) -> Tensor:
    first = x * torch.from_numpy(array)
    array[1] = 0.9
    return first + torch.from_numpy(array)


STEPS = (overwrites, overwrites_behind_a_mean, counts, writes_first, between_two_reads)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_tensor_has_what_was_there_when_it_was_read(step: Callable[[Any, Tensor], Tensor], may_go_live: bool) -> None:
    ours, eagers = (np.full(3, 0.5, np.float32) for _ in range(2))
    compiled = ws.compile(lambda x: step(ours, x), backend="eager")
    for call in range(4):
        x = torch.full((3,), 1.0 + call)
        assert torch.equal(compiled(x), step(eagers, x))
        assert ours.tolist() == eagers.tolist()


def test_one_graph_is_refused_and_leaves_the_array() -> None:
    array = np.full(3, 0.5, np.float32)
    with pytest.raises(CaptureError, match="changes Python state"):
        ws.compile(lambda x: overwrites(array, x), backend="eager", fullgraph=True)(torch.ones(3))
    assert array.tolist() == [0.5] * 3
