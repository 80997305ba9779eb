"""Results taken out of memory that is written again: values, and what they share with each other and with inputs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from wholestep.lower.cudagraph.output_copies import Call, StaticInput, plan_copies, storage_of, unshared


def take(
    values: list[Tensor], inputs: Mapping[int, tuple[Tensor, Tensor]] | None = None, **options: Any
) -> list[Tensor]:
    """The results. `inputs`: by number, where graphs have it and the input itself."""
    pairs = inputs or {}
    standins = {storage_of(one): StaticInput(number, one, whole.stride()) for number, (one, whole) in pairs.items()}
    by_number = dict(enumerate(values))
    found = plan_copies(by_number, standins, **options)
    call = Call({number: whole for number, (_, whole) in pairs.items()}, by_number)  # type: ignore[arg-type]
    return [found[number](call) for number in by_number]


def share(one: Tensor, other: Tensor) -> bool:
    return storage_of(one) == storage_of(other)


def test_a_tensor_that_is_returned_twice_is_one() -> None:
    y = torch.arange(6.0).view(2, 3)
    one, row, again = take([y, y[1], y])
    assert one is again
    y.fill_(7)
    assert one.tolist() == [[0, 1, 2], [3, 4, 5]]
    one[1] = 9
    assert row.tolist() == [9, 9, 9]
    assert take([y, y])[0].stride() == y.stride()


@pytest.mark.parametrize("seen", ["t", "ravel", "detach", "narrow"])
def test_what_is_seen_in_another_result_is_seen_in_its_copy(seen: str) -> None:
    y = torch.arange(12.0).view(3, 4)
    part = y.narrow(0, 1, 2) if seen == "narrow" else getattr(y, seen)()
    for values in ([y, part], [part, y]):
        found = take(values)
        assert share(*found)
        assert not share(found[0], y)
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, values, strict=True))


def test_columns_of_a_wide_matrix_are_copied_without_the_rest() -> None:
    y = torch.randn(16, 100)
    found = take([y[:, :2], y[:, 50:52]])
    assert [one.untyped_storage().nbytes() for one in found] == [128, 128]
    assert torch.equal(found[0], y[:, :2])


def test_neighbours_in_one_memory_are_copied_each_by_itself() -> None:
    bucket = torch.randn(8)
    found = take([bucket[:4], bucket[4:], bucket[4:4]])
    assert [one.untyped_storage().nbytes() for one in found] == [16, 16, 0]
    assert unshared({0: bucket[:4], 1: bucket[4:], 2: bucket[3:3]}) == {0, 1, 2}
    assert unshared({0: bucket[:4], 1: bucket[3:], 2: torch.ones(2), 3: bucket[:0]}) == {2, 3}


def test_what_lies_in_an_input_is_the_input() -> None:
    w, x = torch.randn(3, 4), torch.randn(8)[2:]
    static = x.clone()
    found = take([w, w.t()[1], static, static[2:], w[2]], {0: (w, w), 1: (static, x)}, new=[4])
    assert found[0] is w
    assert found[2] is x
    w.fill_(1)
    x.fill_(2)
    assert found[1].tolist() == [1, 1, 1]
    assert found[3].tolist() == [2, 2, 2, 2]
    assert found[4].tolist() != [1, 1, 1, 1]


def test_an_input_with_other_strides_than_where_graphs_have_it_is_copied() -> None:
    x = torch.randn(4, 1).expand(4, 3)
    static = x.clone()
    (found,) = take([static[1]], {0: (static, x)})
    assert not share(found, x)
    assert not share(found, static)
    assert torch.equal(found, x[1])


def test_numbers_seen_as_others_are_copied() -> None:
    y = torch.randn(4, dtype=torch.complex64)
    values = [y, y.conj(), torch.view_as_real(y), y.imag]
    found = take(values)
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
    assert not any(share(one, y) for one in found)
    (only,) = take([y.conj()], {0: (y, y)})
    assert torch.equal(only, y.conj())
    assert not share(only, y)


@pytest.mark.parametrize("seed", range(40))
def test_any_views_of_one_memory_keep_their_values(seed: int) -> None:
    rng = random.Random(seed)
    memory, values = torch.arange(60.0), []
    for _ in range(rng.randint(1, 5)):
        size = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        stride = [rng.randint(0, 5) for _ in size]
        values.append(memory.as_strided(size, stride, rng.randint(0, 20)))
    wanted = [one.clone() for one in values]
    found = take([*values, values[0]])
    memory.fill_(-1)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=False))
    assert found[-1] is found[0]
