"""Work for after a capture."""

from __future__ import annotations

import pytest

from wholestep.lower.cudagraph import capture_hooks


def test_work_is_done_behind_the_block_in_order_and_once() -> None:
    done: list[int] = []
    with capture_hooks.running_hooks():
        assert capture_hooks.after_capture(lambda: done.append(1))
        assert capture_hooks.after_capture(lambda: done.append(2))
        assert done == []
    assert done == [1, 2]
    with capture_hooks.running_hooks():
        pass
    assert done == [1, 2]


def test_nobody_does_it_outside_or_behind_a_block_that_failed() -> None:
    done: list[int] = []
    assert not capture_hooks.after_capture(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError), capture_hooks.running_hooks():
        done.extend([1 / 0] if capture_hooks.after_capture(lambda: done.append(2)) else [])
    assert not capture_hooks.after_capture(lambda: done.append(3))
    assert done == []
