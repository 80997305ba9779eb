"""How far values are apart: bits, rounding, and what is neither."""

from __future__ import annotations

import math

import pytest
import torch

from wholestep.runtime.verify.state_backup import freed_like
from wholestep.runtime.verify.tolerance import REORDERED, gap

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, math.nan, math.inf]), torch.tensor([1 + 2j]), torch.tensor([True]), torch.ones(0), 3, 0.1,
        math.nan, None, [torch.ones(2), (1.0, None)],
    ],
)  # fmt: skip
def test_equal_values_are_not_apart(value: object) -> None:
    assert gap(value, value) is None


def test_the_widest_gap_is_named() -> None:
    wanted = torch.zeros(2, 3)
    got = wanted.clone()
    got[1, 2], got[0, 1] = -4, 3
    one = gap(got, wanted)
    assert one is not None
    assert (one.index, one.got, one.wanted, one.distance, one.is_fault) == ((1, 2), -4, 0, 4, True)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.tensor([math.nan]), torch.tensor([1.0])),
        (torch.tensor([math.inf]), torch.tensor([-math.inf])),
        (torch.tensor([2]), torch.tensor([1])),
        (0.5, 0.25),
        (None, torch.ones(1)),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)]),
    ],
)
def test_what_no_rounding_explains_is_a_fault(got: object, wanted: object) -> None:
    assert gap(got, wanted).is_fault  # type: ignore[union-attr]


@pytest.mark.parametrize(("roundings", "is_fault"), [(REORDERED - 1, False), (REORDERED + 1, True)])
def test_rounding_is_measured_in_the_largest_value(roundings: int, is_fault: bool) -> None:
    wanted = torch.tensor([1024.0, 1.0])
    one = gap(wanted + torch.tensor([0.0, 1024 * roundings * EPS]), wanted)
    assert one.is_fault is is_fault  # type: ignore[union-attr]


def test_an_update_is_measured_in_how_far_it_went() -> None:
    old = torch.full((4,), 1.0)
    new = old + 2.0**-10
    stale = old + 0.7 * 2.0**-10
    assert gap(stale, new, old).is_fault  # type: ignore[union-attr]
    assert not gap(new * (1 + EPS), new, old).is_fault  # type: ignore[union-attr]
    assert gap(new * (1 + 8 * EPS), new, old).is_fault  # type: ignore[union-attr]


def test_a_tensor_without_memory_equals_another_one_only() -> None:
    freed = freed_like(torch.ones(2))  # never printed: there is nothing to read
    assert gap(freed, freed_like(torch.ones(2))) is None
    assert gap(freed, torch.ones(2)).is_fault  # type: ignore[union-attr]
