"""Signs of life in one process: what a beat tells, and when a rank counts as waiting in a call."""

import threading
import time

import pytest
import torch.distributed as dist

from wholestep.runtime.distributed import heartbeat as module
from wholestep.runtime.distributed.heartbeat import Heartbeat


@pytest.fixture
def store(monkeypatch):
    """One store for all; a HashStore has no connections to clone."""
    monkeypatch.setattr(module, "own_connection", lambda store: store)
    return dist.HashStore()


@pytest.fixture
def heartbeats(store):
    made = [Heartbeat(store, rank=rank, size=2) for rank in range(2)]
    yield made
    for heartbeat in made:
        if heartbeat._thread.ident is not None:
            heartbeat.stop("the test is over")


def awaited(heartbeat, is_it):
    """The first beat of rank 1 that is such a one."""
    deadline = time.monotonic() + 30
    while not is_it(beat := heartbeat.beats([1])[1]):
        assert time.monotonic() < deadline, beat
        time.sleep(0.01)
    return beat


def test_a_beat_tells_the_call_and_the_line_of_the_thread_that_made_it(store):
    ready, over = threading.Event(), threading.Event()
    made = []

    def lives():
        heartbeat = Heartbeat(store, rank=1, size=2)
        heartbeat.beat_every_s = 0.02
        heartbeat.activity = lambda: "train_step, call 7"
        heartbeat.start()
        made.append(heartbeat)
        ready.set()
        over.wait(60)

    thread = threading.Thread(target=lives)
    thread.start()
    ready.wait(10)
    line = lives.__code__.co_firstlineno + 7
    beat = awaited(Heartbeat(store, rank=0, size=2), lambda beat: beat.line == f"test_heartbeat.py:{line}")
    over.set()
    thread.join()
    made[0].stop("over")
    assert (beat.activity, beat.line) == ("train_step, call 7", f"test_heartbeat.py:{line}")
    assert str(beat) == f"in train_step, call 7 (test_heartbeat.py:{line})"


def test_a_rank_outside_and_one_that_has_not_come(heartbeats):
    heartbeats[0].start()
    beats = heartbeats[1].beats([0, 1])
    assert str(beats[0]).startswith("outside of any compiled step (test_heartbeat.py:")
    assert str(beats[1]) == "not yet in its World"


def test_a_rank_is_stuck_when_it_has_been_in_the_same_call_for_long(heartbeats, monkeypatch):
    monkeypatch.setattr(module, "STUCK_AFTER_S", 0.2)
    heartbeats[1].activity = lambda: "step, call 3"
    heartbeats[1].start()
    assert heartbeats[0].stuck([1], "step, call 3") == {}
    time.sleep(0.3)
    assert heartbeats[0].stuck([1], "step, call 4") == {}
    assert list(heartbeats[0].stuck([1], "step, call 3")) == [1]


def test_a_rank_that_moves_is_not_stuck(heartbeats, monkeypatch):
    monkeypatch.setattr(module, "STUCK_AFTER_S", 0.2)
    heartbeats[1].beat_every_s = 0.01
    call = 3
    heartbeats[1].activity = lambda: f"step, call {call}"
    heartbeats[1].start()
    assert heartbeats[0].stuck([1], "step, call 3") == {}
    time.sleep(0.3)
    call = 4
    awaited(heartbeats[0], lambda beat: beat.activity == "step, call 4")
    assert heartbeats[0].stuck([1], "step, call 4") == {}
    assert heartbeats[0].stuck([1], "step, call 3") == {}
