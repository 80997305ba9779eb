"""What the pools of the tests themselves promise."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.harness.rank_pools import Pool
from wholestep.errors import RankMissingError

pytestmark = [pytest.mark.ranks, pytest.mark.skipif(sys.platform != "linux", reason="the ranks are forked")]


@pytest.fixture
def pair() -> Iterator[Pool]:
    made = Pool(2)
    yield made
    made.close()


def waits_elsewhere(ready: threading.Event) -> None:
    ready.set()
    threading.Event().wait(60)


def ends_by(number: int) -> None:
    ready = threading.Event()
    threading.Thread(target=waits_elsewhere, args=(ready,), daemon=True).start()
    ready.wait(10)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)


def number_of_rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_rank_that_a_signal_ends_leaves_the_stacks_of_its_threads(pair: Pool, number: int) -> None:
    with pytest.raises(
        RankMissingError, match=f"Rank 1 of 2 was ended by signal {signal.Signals(number).name}"
    ) as found:
        pair.run(ends_by, number)
    (note,) = found.value.__notes__
    assert note.startswith("Rank 1, process ")
    assert f'File "{__file__}", line {ends_by.__code__.co_firstlineno + 5} in ends_by' in note
    assert f'File "{__file__}", line {waits_elsewhere.__code__.co_firstlineno + 2} in waits_elsewhere' in note
    assert pair.run(number_of_rank) == [0, 1], "a pool is made anew"


def raises_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no")


def test_a_rank_that_raises_leaves_no_stacks(pair: Pool) -> None:
    with pytest.raises(ValueError, match="no") as found:
        pair.run(raises_on_rank_1)
    assert not hasattr(found.value, "__notes__")
