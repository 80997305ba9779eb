"""The host's part of a step: equal numbers are computed with once, and nothing else changes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.unit.lower.gpu_programs import Spec, gpu, host, scheduled, targets
from wholestep.ir.ops.packed_scalars import pack
from wholestep.ir.program import InputKind, Program
from wholestep.lower.base import eager_backend
from wholestep.lower.cudagraph.host_part import MOST_PATTERNS, HostPart, merge_equal, pattern_of, split_host
from wholestep.lower.cudagraph.partition import Partition, partition

COUNT = 6


def counter(dtype: torch.dtype = torch.float32) -> Spec:
    return host(kind=InputKind.OPTIMIZER, dtype=dtype)


def host_of(fn: Callable[..., Any], *specs: Spec) -> Program:
    """The host's part of a step, with what it packs left on the CPU."""
    parts = partition(scheduled(fn, *specs, writes=True))
    assert isinstance(parts, Partition), parts
    for node in parts.host.graph.find_nodes(op="call_function", target=pack):
        node.args = (node.args[0], torch.device("cpu"))
    return parts.host


def updates(w: Tensor, rate: Tensor, *counters: Tensor) -> tuple[Any, ...]:
    """What an optimizer does parameter by parameter: a counter goes up, and a rate is made of it."""
    for one in counters:
        one.add_(1)
        w.add_(rate.item() / (1 - 0.9 ** one.item()))
    return w.sum(), counters[0] * 2


UPDATES = (gpu(3, kind=InputKind.PARAM), host(), *[counter()] * COUNT)


def outputs(
    run: Callable[[list[Any]], Sequence[Any]], values: Sequence[float], dtype: torch.dtype = torch.float32
) -> list[Any]:
    """Bits of what the host gives and leaves in its counters, for counters that begin with some values."""
    counters = [torch.tensor(value, dtype=dtype) for value in values]
    with torch.no_grad():
        given_ = run([None, torch.tensor(0.1, dtype=torch.float64), *counters])
    bits = [*filter(torch.is_tensor, given_), *counters]
    return [[math.copysign(1, x) if x == 0 else x for x in map(float, one.flatten())] for one in bits]


def test_equal_counters_are_computed_with_once():
    program = host_of(updates, *UPDATES)
    split = split_host(program)
    assert split is not None
    assert split.num_numbers == COUNT
    powers = [targets(one).count(operator.pow) for one in (program, split.before, split.after)]
    assert powers == [COUNT, 0, COUNT]
    merged = [merge_equal(split.after, pattern) for pattern in ((0,) * COUNT, (0, 1, 0, 1, 0, 1), tuple(range(COUNT)))]
    assert [targets(one).count(operator.pow) for one in merged] == [1, 2, COUNT]
    assert [targets(one).count(operator.truediv) for one in merged] == [1, 2, COUNT]
    assert targets(split.after).count(operator.pow) == COUNT  # what is merged is a copy


FLOATS = st.sampled_from([0.0, -0.0, 1.0, 2.0, 7.0, -1.0, math.inf])


def scaled(w: Tensor, rate: Tensor, *numbers: Tensor) -> tuple[Any, ...]:
    """Numbers that keep their sign, -0.0 among them."""
    for one in numbers:
        one.mul_(2)
        w.add_(rate.item() * one.item())
        w.add_(0.9 ** one.item())
    return (w.sum(),)


SCALED = host_of(scaled, *UPDATES)


@settings(max_examples=60)
@given(st.lists(st.lists(FLOATS, min_size=COUNT, max_size=COUNT), min_size=1, max_size=6))
def test_results_are_the_same_bits(calls: list[list[float]]):
    program = SCALED
    plain, part = eager_backend.lower(program), HostPart(program, eager_backend.lower)
    for values in calls:
        assert repr(outputs(part, values)) == repr(outputs(plain, values))


def test_numbers_are_read_where_they_stand():
    """A step that reads its counter, writes it, and reads it again."""

    def step(w: Tensor, rate: Tensor, *counters: Tensor) -> tuple[Any, ...]:
        for one in counters:
            old = one.item()
            one.mul_(2)
            w.add_(rate.item() * (old - one.item()))
        return (w.sum(),)

    program = host_of(step, *UPDATES)
    split = split_host(program)
    assert split is not None
    assert split.num_numbers == 2 * COUNT
    plain, part = eager_backend.lower(program), HostPart(program, eager_backend.lower)
    for values in ([3.0] * COUNT, [0.0] * COUNT, [1.0, 2.0, 4.0, 2.0, 1.0, 8.0]):
        assert repr(outputs(part, values)) == repr(outputs(plain, values))


def test_what_is_written_with_a_number_is_read_behind_it():
    """What stands behind the first call that does more with a number than to compute is left as it is."""

    def step(w: Tensor, rate: Tensor, *counters: Tensor) -> tuple[Any, ...]:
        for one in counters:
            w.add_(one.item() * rate.item())
        counters[0].add_(counters[1].item() * 2)
        for one in counters:
            w.add_(one.item() * rate.item())
        return (w.sum(),)

    program = host_of(step, *UPDATES)
    split = split_host(program)
    assert split is not None
    assert split.num_numbers < 2 * COUNT + 1
    plain, part = eager_backend.lower(program), HostPart(program, eager_backend.lower)
    for values in ([3.0] * COUNT, [1.0, 2.0, 4.0, 2.0, 1.0, 8.0]):
        assert repr(outputs(part, values)) == repr(outputs(plain, values))


def test_numbers_of_another_dtype_are_not_equal():
    """3 and 3.0 are, in Python; their powers of ten thousand are not."""

    def step(w: Tensor, rate: Tensor, *counters: Tensor) -> tuple[Any, ...]:
        return w.add_(rate.item()).sum(), *((one.item() ** 40 + 1) % 1000 for one in counters)

    whole = [counter(torch.int64)] * 2
    program = host_of(step, gpu(3, kind=InputKind.PARAM), host(), *[counter()] * COUNT, *whole)
    split = split_host(program)
    assert split is not None
    assert split.num_numbers == COUNT
    plain, part = eager_backend.lower(program), HostPart(program, eager_backend.lower)
    inputs = [None, torch.tensor(0.1), *[torch.tensor(3.0)] * COUNT, *[torch.tensor(3)] * 2]
    (_, *expected), (_, *found) = plain(list(inputs)), part(inputs)
    assert repr(found) == repr(expected)
    assert len(set(found)) == 2


@pytest.mark.parametrize("num_counters", [0, 1, 3])
def test_few_numbers_are_not_worth_it(num_counters: int):
    specs = (gpu(3, kind=InputKind.PARAM), host(), *[counter()] * max(num_counters, 1))

    def step(w: Tensor, rate: Tensor, *counters: Tensor) -> tuple[Any, ...]:
        return updates(w, rate, *counters) if num_counters else (w.add_(1).sum(),)

    assert split_host(host_of(step, *specs)) is None


def test_there_are_only_so_many_programs():
    lowered: list[Program] = []

    def lower(program: Program) -> Any:
        lowered.append(program)
        return eager_backend.lower(program)

    program = host_of(updates, *UPDATES)
    plain, part = eager_backend.lower(program), HostPart(program, lower)
    for number in range(3 * MOST_PATTERNS):
        values = [float(1 + (number >> place & 1)) for place in range(COUNT)]
        assert repr(outputs(part, values)) == repr(outputs(plain, values))
    # What reads them, one a pattern, and the one for all others.
    assert len(lowered) == 1 + MOST_PATTERNS + 1


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ((1.0, 1.0, 1.0), (0, 0, 0)),
        ((1.0, 2.0, 1.0), (0, 1, 0)),
        ((0.0, -0.0, 0.0), (0, 1, 2)),
        ((math.nan, math.nan, 1.0), (0, 0, 2)),  # one object, so the same bits
        ((float("nan"), float("nan"), 1.0), (0, 1, 2)),
    ],
)
def test_which_numbers_are_equal(numbers: tuple[float, ...], pattern: tuple[int, ...]):
    assert pattern_of(numbers) == pattern
