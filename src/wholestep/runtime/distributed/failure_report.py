"""Explains a failed collective: which rank died, ended or is elsewhere.

A collective only says that a connection broke or that time ran out. The store still answers, so the ranks' signs of
life (`wholestep.runtime.distributed.heartbeat`) tell the rest. The first rank that finds out publishes its verdict, and
all others that fail later raise the same one: when one rank dies its neighbours fail, and then theirs, for a cause that
is not them.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from wholestep.errors import RankMissingError
from wholestep.runtime.distributed.heartbeat import Beat, Heartbeat
from wholestep.runtime.distributed.rank_diff import ranks_text
from wholestep.runtime.distributed.world import World

DEAD_AFTER_S = 3.0
"""Without a beat for so long a rank counts as dead, once a collective has failed."""

# The words of gloo, NCCL and c10d for "a peer is not there"; in torch 2.11 and 2.13 gloo raises plain RuntimeErrors.
_MARKS = ("gloo", "nccl", "c10d", "connection closed by peer", "connection reset by peer", "broken pipe", "socket")


@contextmanager
def named_failures(world: World, what: Callable[[], str]) -> Iterator[None]:
    """Around the run of a step: a failure of communication is raised as `RankMissingError` that names its cause.

    `what` says where this rank is, such as ``train_step, call 7``: the same words on every rank and new ones at every
    call. Another thread calls it now and then, so it only reads. The original error is kept as the cause; other
    errors pass through untouched.
    """
    heartbeat = world.heartbeat
    if heartbeat is None:
        yield
        return
    outer, heartbeat.activity = heartbeat.activity, what
    try:
        yield
    except Exception as error:
        named = explain_failure(error, world, what())
        if named is None:
            raise
        raise named from error
    finally:
        heartbeat.activity = outer


def explain_failure(error: BaseException, world: World, what: str) -> RankMissingError | None:
    """The error that names who caused `error` during `what`, or None when it is no failure of communication.

    Takes up to a few seconds: a rank counts as dead when its signs of life have stopped.
    """
    heartbeat = world.heartbeat
    if heartbeat is None or not is_communication_failure(error):
        return None
    said = (str(error).splitlines() or [""])[0].partition(" This is typically caused by")[0]
    try:
        message = _verdict(heartbeat, what, said)
    except dist.DistError:
        message = (
            f"Rank 0 of {world.size}, or the launcher, died: {what} failed on rank {world.rank}, and the rendezvous "
            f"store, which that process keeps, is out of reach. See the output of rank 0. torch said: {said}"
        )
    return RankMissingError(message)


def is_communication_failure(error: BaseException) -> bool:
    """Whether `error` comes from a collective that lost a peer or ran out of time."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(mark in text for mark in _MARKS)


def _verdict(heartbeat: Heartbeat, what: str, said: str) -> str:
    """Published by the first rank that failed in `what`, read by the others that fail there."""
    key = f"verdict/{hashlib.sha256(what.encode()).hexdigest()[:16]}"
    if not heartbeat.store.check([key]):
        heartbeat.store.compare_set(key, "", _diagnosis(heartbeat, key, what, said))
    return heartbeat.store.get(key).decode()


def _diagnosis(heartbeat: Heartbeat, key: str, what: str, said: str) -> str:
    """Watch the others until one is found to be gone, or all have shown that they live."""
    others = [rank for rank in range(heartbeat.size) if rank != heartbeat.rank]
    started = time.monotonic()
    silent_s = max(DEAD_AFTER_S, 4 * heartbeat.beat_every_s)
    first = {rank: beat.count for rank, beat in heartbeat.beats(others).items()}
    while True:
        beats = heartbeat.beats(others)
        ended = {rank: how for rank, how in heartbeat.farewells().items() if rank in others}
        quiet = [rank for rank in others if rank not in ended and beats[rank].count == first[rank]]
        if heartbeat.store.check([key]):
            return ""  # somebody else knows; what is returned here is not used
        if ended or not quiet or time.monotonic() - started > silent_s:
            break
        time.sleep(0.1)
    alive = [rank for rank in others if rank not in ended and rank not in quiet]
    tail = f"The collective failed on rank {heartbeat.rank} with: {said}"
    if ended:
        how = "; ".join(f"rank {rank} {ended[rank]}" for rank in sorted(ended))
        return (
            f"{ranks_text(ended).capitalize()} of {heartbeat.size} ended while "
            f"{ranks_text([heartbeat.rank, *alive])} needed {'it' if len(ended) == 1 else 'them'} in {what}: {how}. "
            f"Every rank must run the same number of steps; uneven data is the usual cause. {tail}"
        )
    if quiet:
        locations = "; ".join(f"rank {rank} was last {beats[rank]}" for rank in quiet)
        return (
            f"{ranks_text(quiet).capitalize()} of {heartbeat.size} died during {what} (no sign of life for "
            f"{silent_s:.0f} s, while {ranks_text([heartbeat.rank, *alive])} lived): {locations}. See the output of "
            f"{ranks_text(quiet)}: a crash in native code, or the system ending it for memory. {tail}"
        )
    return _all_alive(heartbeat, beats, what, tail)


def _all_alive(heartbeat: Heartbeat, beats: dict[int, Beat], what: str, tail: str) -> str:
    """Nobody died, so somebody is elsewhere or too slow: say where everybody is."""
    where: dict[str, list[int]] = defaultdict(list)
    for rank, beat in (beats | heartbeat.beats([heartbeat.rank])).items():
        where[str(beat)].append(rank)
    absent = [rank for rank, beat in beats.items() if beat.activity != what]
    locations = "; ".join(f"{ranks_text(ranks)}: {place}" for place, ranks in where.items())
    if absent:
        ranks = f"{ranks_text(absent).capitalize()} of {heartbeat.size}"
        head = f"{ranks} did not take part in {what}, though alive. {locations}."
    else:
        rank, size = heartbeat.rank, heartbeat.size
        head = f"A collective in {what} failed on rank {rank} while all {size} ranks are alive and in it."
    return (
        f"{head} Look for a rank that waits (a data loader, a file, a breakpoint) or took another branch, or raise the "
        f"timeout of wholestep.init(timeout_s=...). {tail}"
    )
