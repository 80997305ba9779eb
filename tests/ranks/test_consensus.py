"""Agreement among real processes, over the store of the default process group."""

import os
import time

import pytest

from wholestep.errors import RankMismatchError, RankMissingError
from wholestep.runtime.distributed.consensus import abandon, agree, default_store
from wholestep.runtime.distributed.world import init

PLAN = "\n".join(f"#{i} all_reduce float32[{i}] mean" for i in range(200))


def present(texts, key, timeout_s=30.0):
    """Show the text of this rank; None stays away, an exception gives up. Returns the class and words of the error."""
    world = init()
    text = texts[world.rank]
    options = {"store": default_store(), "rank": world.rank, "size": world.size, "key": key}
    if text is None:
        return None
    if isinstance(text, Exception):
        abandon(text, **options)
        return None
    started = time.monotonic()
    try:
        agree(text, timeout_s=timeout_s, peers=world, **options)
    except (RankMismatchError, RankMissingError) as error:
        return type(error), str(error), time.monotonic() - started
    return "agreed"


def test_two_ranks_agree(pool2):
    assert pool2.run(present, [PLAN, PLAN], "two") == ["agreed"] * 2


def test_four_ranks_agree(pool4):
    assert pool4.run(present, [PLAN] * 4, "four") == ["agreed"] * 4


def test_a_mismatch_is_the_same_on_every_rank(pool4):
    found = pool4.run(present, [PLAN, PLAN, PLAN.replace("#9 all_reduce", "#9 broadcast"), PLAN], "mismatch")
    assert {kind for kind, _, _ in found} == {RankMismatchError}
    assert len({message for _, message, _ in found}) == 1
    assert "Rank 2 differs from ranks 0, 1, 3" in found[0][1]
    assert "+#9 broadcast" in found[0][1]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_stays_away_is_named(pool2, missing):
    texts = [PLAN, PLAN]
    texts[missing] = None
    kind, message, waited_s = pool2.run(present, texts, f"away {missing}", 1.0)[1 - missing]
    assert kind is RankMissingError
    assert f"Rank {missing} of 2 did not come" in message
    assert 1.0 <= waited_s < 10


def test_a_rank_that_gave_up_is_named_at_once(pool2):
    found = pool2.run(present, [PLAN, ValueError("train.py:7")], "gave up")
    kind, message, waited_s = found[0]
    assert kind is RankMissingError
    assert "Rank 1 gave up" in message
    assert "train.py:7" in message
    assert waited_s < 10


def exits_before_the_first_step(how):
    world = init()
    if world.rank == 1:
        if how == "leaves":
            world.close()
            return None
        os._exit(4)
    with pytest.raises(RankMissingError) as caught:
        agree(PLAN, store=world.store, rank=0, size=2, key=f"exits {how}", timeout_s=100, peers=world)
    raise RankMissingError(str(caught.value))


@pytest.mark.parametrize(
    ("how", "words"),
    [("leaves", "rank 1 left its World"), ("dies", "rank 1 has given no sign of life")],
    ids=["leaves", "dies"],
)
def test_a_rank_that_ended_is_named_long_before_the_timeout(pool2, how, words):
    pool2.begin()
    started = time.monotonic()
    with pytest.raises(RankMissingError, match=words):
        pool2.run(exits_before_the_first_step, how, grace_s=60)
    assert time.monotonic() - started < 60
