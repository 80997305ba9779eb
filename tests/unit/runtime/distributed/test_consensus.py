"""Agreement among threads: one HashStore, or one connection to a TCPStore per rank."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from wholestep.errors import InternalError, RankMismatchError, RankMissingError
from wholestep.runtime.distributed import consensus as module
from wholestep.runtime.distributed.consensus import abandon, agree


def hash_stores(size):
    store = dist.HashStore()
    return [store] * size


def tcp_stores(size):
    timeout = timedelta(seconds=20)
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    rest = [dist.TCPStore("127.0.0.1", first.port, is_master=False, timeout=timeout) for _ in range(size - 1)]
    return [first, *rest]


@pytest.fixture(params=[hash_stores, tcp_stores], ids=["HashStore", "TCPStore"])
def stores(request):
    return request.param


def meet(stores, acts):
    """Run one callable per rank in threads; returns what each returned or raised."""

    def attempt(rank):
        try:
            return acts[rank](stores[rank], rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(attempt, range(len(acts))))


def shows(text, *, size, timeout_s=20.0, key="k", after_s=0.0, **options):
    def act(store, rank):
        time.sleep(after_s)
        return agree(text, store=store, rank=rank, size=size, key=key, timeout_s=timeout_s, **options)

    return act


def stays_away(store, rank):
    return None


def missing_errors(outcomes, count=2):
    """The errors about missing ranks; the other ranks have none."""
    errors = [outcome for outcome in outcomes if outcome is not None]
    assert [type(error) for error in errors] == [RankMissingError] * count
    return [str(error) for error in errors]


@contextmanager
def within(limit_s):
    started = time.monotonic()
    yield
    assert time.monotonic() - started < limit_s


class Peers:
    """What a test says about the ranks."""

    def __init__(self, ended=(), stay=()):
        self.ended, self.stay = dict(ended), dict(stay)

    def departed(self, ranks):
        return {rank: self.ended[rank] for rank in ranks if rank in self.ended}

    def locations(self, ranks):
        return {rank: f"outside ({rank}.py:1)" for rank in ranks}

    def stuck(self, ranks, call):
        return {rank: self.stay[rank] for rank in ranks if rank in self.stay and call in self.stay[rank]}


@pytest.mark.parametrize("size", [1, 2, 7])
def test_equal_texts_agree(stores, size):
    assert meet(stores(size), [shows("plan", size=size)] * size) == [None] * size


def test_a_late_rank_is_waited_for(stores):
    acts = [shows("plan", size=3, after_s=delay) for delay in (0.3, 0.0, 0.6)]
    assert meet(stores(3), acts) == [None] * 3


def test_a_mismatch_is_the_same_error_on_every_rank(stores):
    plan = "\n".join(f"#{i} all_reduce" for i in range(100))
    acts = [shows(plan if rank != 2 else plan.replace("#7 all_reduce", "#7 broadcast"), size=4) for rank in range(4)]
    errors = meet(stores(4), acts)
    assert {type(error) for error in errors} == {RankMismatchError}
    assert len({str(error) for error in errors}) == 1
    message = str(errors[0])
    assert "Rank 2 differs from ranks 0, 1, 3" in message
    assert "-#7 all_reduce" in message
    assert "+#7 broadcast" in message


def test_more_groups_than_are_shown(stores):
    errors = meet(stores(7), [shows(f"plan of {rank}", size=7) for rank in range(7)])
    assert {type(error) for error in errors} == {RankMismatchError}
    assert "Rank 1 differs from rank 0" in str(errors[6])
    assert "Ranks 4-6 differ in yet other ways." in str(errors[6])


@pytest.mark.parametrize("missing", [{1}, {0}, {0, 2}])
def test_missing_ranks_are_named_after_the_timeout(stores, monkeypatch, missing):
    monkeypatch.setattr(module, "VERDICT_GRACE_S", 0.3)
    monkeypatch.setattr(module, "LINGER_S", 0.3)
    acts = [stays_away if rank in missing else shows("x", size=3, timeout_s=1.0) for rank in range(3)]
    with within(20):
        errors = missing_errors(meet(stores(3), acts), 3 - len(missing))
    assert len(set(errors)) == 1
    names = "Rank 1 of 3" if missing == {1} else "Rank 0 of 3" if missing == {0} else "Ranks 0, 2 of 3"
    assert re.match(rf"{names} did not come to the plan agreement in \d+\.\d s", errors[0])
    assert "still be compiling" in errors[0]


@pytest.mark.parametrize("quitter", [0, 1])
def test_a_rank_that_gave_up_is_named_at_once_with_its_reason(stores, quitter):
    def gives_up(store, rank):
        abandon(ValueError("train.py:12: loss.item()"), store=store, rank=rank, key="k", size=3)

    acts = [gives_up if rank == quitter else shows("x", size=3, timeout_s=60) for rank in range(3)]
    with within(30):
        errors = missing_errors(meet(stores(3), acts))
    assert f"Rank {quitter} gave up" in errors[0]
    assert "ValueError: train.py:12: loss.item()" in errors[0]


def test_when_all_give_up_nobody_waits(stores, monkeypatch):
    monkeypatch.setattr(module, "LINGER_S", 60.0)

    def gives_up(store, rank):
        abandon("reason", store=store, rank=rank, key="k", size=3)

    with within(30):
        assert meet(stores(3), [gives_up] * 3) == [None] * 3


@pytest.mark.parametrize("ended", [0, 1])
def test_a_rank_known_to_have_ended_is_not_waited_for(stores, ended):
    departed = Peers(ended={ended: "ended its program"})
    acts = [stays_away if rank == ended else shows("x", size=3, timeout_s=60, peers=departed) for rank in range(3)]
    with within(30):
        errors = missing_errors(meet(stores(3), acts))
    assert f"rank {ended} ended its program" in errors[0]


@pytest.mark.parametrize("runs", [0, 1])
def test_a_rank_that_waits_in_the_same_call_is_not_waited_for(stores, runs):
    peers = Peers(stay={runs: "step, call 3"})
    options = {"size": 3, "timeout_s": 60, "call": "step, call 3", "peers": peers}
    acts = [stays_away if rank == runs else shows("x", **options) for rank in range(3)]
    with within(30):
        errors = missing_errors(meet(stores(3), acts))
    assert f"Rank {runs} needed no new plan for this call" in errors[0]
    assert f"Rank {runs} was last outside ({runs}.py:1)." in errors[0]


def test_a_rank_that_is_in_another_call_is_waited_for(stores):
    peers = Peers(stay={1: "step, call 2"})
    options = {"size": 2, "timeout_s": 60, "call": "step, call 3", "peers": peers}
    assert meet(stores(2), [shows("x", **options), shows("x", after_s=1.5, **options)]) == [None, None]


def waits_here(store, rank):
    shows("x", size=4, timeout_s=1.0)(store, rank)


def waits_there(store, rank):
    agree("x", store=store, rank=rank, size=4, key="k", timeout_s=1.0)


def test_the_lines_of_those_who_wait_are_told(stores):
    errors = meet(stores(4), [waits_here, waits_there, waits_here, stays_away])
    assert len({str(error) for error in errors[:3]}) == 1
    line = waits_there.__code__.co_firstlineno + 1
    assert re.search(
        rf"ranks 0, 2 \(test_consensus\.py:\d+\), rank 1 \(test_consensus\.py:{line}\) wait\.", str(errors[0])
    )


def test_a_rank_that_ended_after_it_came_is_no_loss():
    """It may be quicker than the others: its hash is there, and that is all that was wanted of it."""
    store = dist.HashStore()
    departed = Peers(ended={1: "ended"})
    acts = [shows("x", size=2, after_s=1.5, peers=departed), shows("x", size=2, peers=departed)]
    assert meet([store, store], acts) == [None, None]


def test_a_key_that_is_used_twice_is_an_error_and_not_an_old_verdict():
    stores = hash_stores(2)
    assert meet(stores, [shows("x", size=2)] * 2) == [None, None]
    errors = meet(stores, [shows("x", size=2), shows("y", size=2)])
    assert [type(error) for error in errors] == [InternalError] * 2


def test_keys_keep_meetings_apart():
    stores = hash_stores(2)
    for number in range(3):
        assert meet(stores, [shows(f"plan {number}", size=2, key=f"step/{number}")] * 2) == [None, None]


def test_a_store_that_died_names_the_process_that_kept_it():
    first, second = tcp_stores(2)
    del first
    with pytest.raises(RankMissingError, match="the process that keeps it"):
        agree("x", store=second, rank=1, size=2, key="k", timeout_s=5)
    abandon("x", store=second, rank=1, key="k")  # the error that follows is the caller's


def test_the_good_case_is_cheap():
    stores = tcp_stores(2)
    took_s = []
    for number in range(20):
        started = time.monotonic()
        assert meet(stores, [shows("x" * 10_000, size=2, key=str(number))] * 2) == [None, None]
        took_s.append(time.monotonic() - started)
    assert min(took_s) < 0.1  # the quickest: others may use the cores, too
