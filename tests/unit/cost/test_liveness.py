"""Live bytes of an order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholestep.cost.liveness import Ledger, Make, Usage, at_peak, peak_bytes

IN_PLACE = Usage(reads=(0,), makes=(Make(buffer=1, num_bytes=10, onto=0),))


def test_a_buffer_lives_from_its_maker_to_its_last_reader():
    ledger = Ledger([Usage(makes=(Make(buffer=0, num_bytes=10),)), Usage(reads=(0,)), Usage()])
    seen = []
    for number in range(3):
        ledger.run(number)
        seen.append(ledger.live_bytes)
    assert seen == [10, 0, 0]
    assert ledger.peak_bytes == 10


def test_in_place_takes_no_memory():
    made = [Usage(makes=(Make(buffer=0, num_bytes=10),)), IN_PLACE]
    assert peak_bytes([*made, Usage(reads=(1,))]) == 10


def test_in_place_needs_the_last_reader():
    made = [Usage(makes=(Make(buffer=0, num_bytes=10),)), IN_PLACE]
    usages = [*made, Usage(reads=(0,)), Usage(reads=(1,))]
    assert peak_bytes(usages) == 20
    assert peak_bytes(usages, [0, 2, 1, 3]) == 10


def test_what_is_pinned_stays_and_may_be_written_to_only_if_writable():
    usages = [Usage(reads=(0,), makes=(Make(buffer=1, num_bytes=10, onto=0),)), Usage(reads=(1,))]
    assert peak_bytes(usages, pinned=[0]) == 10
    assert peak_bytes(usages, pinned=[0], writable=[0]) == 0


@pytest.mark.parametrize("number", [0, 1])
def test_needed_bytes_are_told_before(number):
    usages = [Usage(makes=(Make(buffer=0, num_bytes=10),)), Usage(reads=(0,), makes=(Make(buffer=1, num_bytes=4),))]
    ledger = Ledger(usages)
    for one in range(number):
        ledger.run(one)
    before, needed = ledger.live_bytes, ledger.needed_bytes(number)
    ledger.run(number)
    assert ledger.peak_bytes == before + needed


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=15))
def test_everything_is_freed_in_the_end(made):
    """Task k reads one earlier buffer and makes one."""
    usages = []
    for number, (num_bytes, back) in enumerate(made):
        reads = (number - 1 - back % number,) if number else ()
        onto = reads[0] if reads and back % 2 else None
        usages.append(Usage(reads=reads, makes=(Make(buffer=number, num_bytes=num_bytes, onto=onto),)))
    ledger = Ledger(usages)
    for number in range(len(usages)):
        ledger.run(number)
        assert 0 <= ledger.live_bytes <= ledger.peak_bytes <= sum(num_bytes for num_bytes, _ in made)
    assert ledger.live_bytes == 0


def test_what_is_alive_at_the_peak():
    """The third task makes the most be alive; the first buffer is gone by then."""
    usages = [
        Usage(makes=(Make(buffer=0, num_bytes=10),)),
        Usage(reads=(0,), makes=(Make(buffer=1, num_bytes=4),)),
        Usage(reads=(1,), makes=(Make(buffer=2, num_bytes=30),)),
        Usage(reads=(2,), makes=(Make(buffer=3, num_bytes=4),)),
    ]
    peak = at_peak(usages)
    assert (peak.task, peak.alive) == (2, {1: 4, 2: 30})
    assert at_peak([]).alive == {}


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans()), min_size=1, max_size=15))
def test_the_bytes_at_the_peak_are_the_peak(made):
    usages, pinned = [], []
    for number, (num_bytes, back, stays) in enumerate(made):
        reads = (number - 1 - back % number,) if number else ()
        onto = reads[0] if reads and back % 2 else None
        usages.append(Usage(reads=reads, makes=(Make(buffer=number, num_bytes=num_bytes, onto=onto),)))
        pinned += [number] if stays else []
    peak = at_peak(usages, pinned=pinned)
    assert sum(peak.alive.values()) == peak_bytes(usages, pinned=pinned)
