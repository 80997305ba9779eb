"""Which gradients share a bucket, and which bound each bucket had: the rule of DistributedDataParallel, on sizes."""

from __future__ import annotations

import functools

import pytest

from wholestep.passes.comm.bucket_planner import fixed_cuts, pack

row = functools.partial(pytest.mark.row, "S11")

FLOATS = [("float", 4 * count) for count in (100, 200, 100, 50)]
TENS = [("float", 40)] * 4
ALTERNATING = [("float", 200), ("double", 200)] * 3


@pytest.mark.parametrize(
    ("tensors", "limits", "buckets"),
    [
        pytest.param(FLOATS, [400], [[0], [1], [2], [3]], marks=row("single_limit_single_dtype")),
        pytest.param(ALTERNATING, [400], [[0, 2], [1, 3], [4], [5]], marks=row("single_limit_multi_dtype")),
        pytest.param(TENS, [40, 80], [[0], [1, 2], [3]], marks=row("multi_limit_single_dtype")),
        pytest.param(ALTERNATING, [200, 400], [[0], [1], [2, 4], [3, 5]], marks=row("multi_limit_multi_dtype")),
    ],
)
def test_buckets_are_those_of_the_rule(
    tensors: list[tuple[str, int]], limits: list[int], buckets: list[list[int]]
) -> None:
    keys, sizes = [key for key, _ in tensors], [size for _, size in tensors]
    assert [list(group.items) for group in pack(sizes, keys, fixed_cuts(sizes, keys, limits))] == buckets
