"""Ranks with streams, simulated: what they are given is noted, and runs in any order that the streams allow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from wholestep.lower.kernels import copy_all_reduce

MAIN = copy_all_reduce.NUM_STREAMS
"""The stream of the caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Something that a stream has been given. Work that is None is a meeting."""

    stream: int
    work: Callable[[], object] | None
    behind: frozenset[int]


class Rank:
    """A rank and its streams, as `copies.Peers`. Nothing runs before `run_all`."""

    def __init__(self, rank: int, memories: Sequence[Tensor], without: Sequence[tuple[int, int]] = ()) -> None:
        """`without` are pairs of streams of which the first one does not wait for the second."""
        self.rank, self.size = rank, len(memories)
        self.given: list[_Given] = []
        self._memories, self._without = memories, without
        self._tails: list[frozenset[int]] = [frozenset()] * (copy_all_reduce.NUM_STREAMS + 1)

    def memory(self, rank: int, dtype: torch.dtype) -> Tensor:
        return self._memories[rank].view(dtype)

    def run(self, stream: int, work: Callable[[], object] | None) -> None:
        self.given.append(_Given(stream=stream, work=work, behind=self._tails[stream]))
        self._tails[stream] = frozenset({len(self.given) - 1})

    def wait(self, stream: int, other: int) -> None:
        if (stream, other) not in self._without:
            self._tails[stream] |= self._tails[other]

    def meet(self, stream: int) -> None:
        self.run(stream, None)

    def mark(self, stream: int) -> frozenset[int]:
        return self._tails[stream]

    def wait_for(self, stream: int, mark: frozenset[int]) -> None:
        """What `stream` is given from now on runs after a mark."""
        self._tails[stream] |= mark

    def reduce(
        self, message: Tensor, add: copy_all_reduce.Add, result: Tensor | None = None, *, split: bool = True
    ) -> copy_all_reduce.Pieces:
        """What the operators do, in place unless there is a result."""
        for stream in range(copy_all_reduce.NUM_STREAMS):
            self.wait(stream, MAIN)
        return copy_all_reduce.all_reduce(message, message if result is None else result, self, add, split=split)

    def end_of_graph(self) -> None:
        """What comes runs after what the caller's stream has been given or has waited for, and nothing else."""
        self._tails = [self._tails[MAIN]] * len(self._tails)


def memories_of(size: int) -> list[Tensor]:
    """Symmetric memory; NaN, wherever it is not written."""
    return [torch.full((copy_all_reduce.memory_bytes(size),), 255, dtype=torch.uint8) for _ in range(size)]


def run_all(ranks: Sequence[Rank], draw: random.Random, *, one_queue: bool = False) -> None:
    """Runs everything in an order that `draw` gives, in which some of it is far ahead of other things.

    With `one_queue` a device takes what it is given one by one, in an order of its own that the streams allow, and a
    meeting holds up whatever comes after it. Raises AssertionError where all ranks stand still.
    """
    behind = [[given.behind for given in rank.given] for rank in ranks]
    if one_queue:
        behind = [_in_a_row(_any_order(given, draw)) for given in behind]
    queues = [_Ready(given) for given in behind]
    weights = [[draw.random() ** 4 for _ in rank.given] for rank in ranks]
    rendezvous: dict[int, list[list[int]]] = {}  # of a stream: what each rank has come with, in order
    while any(queue.ready for queue in queues):
        ready = [(rank, index) for rank, queue in enumerate(queues) for index in queue.ready]
        rank, index = max(ready, key=lambda one: draw.random() * weights[one[0]][one[1]])
        queues[rank].ready.remove(index)
        given = ranks[rank].given[index]
        if given.work is not None:
            given.work()
            queues[rank].over(index)
            continue
        came = rendezvous.setdefault(given.stream, [[] for _ in ranks])
        came[rank].append(index)
        if min(map(len, came)) == len(came[rank]):  # the last one
            for queue, indices in zip(queues, came, strict=True):
                queue.over(indices[len(came[rank]) - 1])
    assert not any(queue.missing for queue in queues), "all ranks stand still"


class _Ready:
    """What a rank can run."""

    def __init__(self, behind: Sequence[frozenset[int]]) -> None:
        self.ready = [index for index, deps in enumerate(behind) if not deps]
        self.missing = {index: len(deps) for index, deps in enumerate(behind)}
        self._users: list[list[int]] = [[] for _ in behind]
        for index, deps in enumerate(behind):
            for dep in deps:
                self._users[dep].append(index)

    def over(self, index: int) -> None:
        """Makes ready what has waited for this alone."""
        del self.missing[index]
        for user in self._users[index]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self.ready.append(user)


def _any_order(behind: Sequence[frozenset[int]], draw: random.Random) -> list[int]:
    order, queue = [], _Ready(behind)
    while queue.ready:
        order.append(queue.ready.pop(draw.randrange(len(queue.ready))))
        queue.over(order[-1])
    return order


def _in_a_row(order: Sequence[int]) -> list[frozenset[int]]:
    behind = [frozenset[int]()] * len(order)
    for before, index in itertools.pairwise(order):
        behind[index] = frozenset({before})
    return behind


def added(slots: Tensor, own: Tensor, result: Tensor, shared: Tensor, *, rank: int, averages: bool) -> None:
    """What `wholestep.lower.kernels.add_chunks` does, by operators of torch."""
    wide = torch.float64 if own.dtype is torch.float64 else torch.float32
    total = torch.zeros_like(own, dtype=wide)
    for other, slot in enumerate(slots):
        total = total + (own if other == rank else slot).to(wide)
    result.copy_(total / len(slots) if averages else total)
    shared.copy_(result)


def reduced(messages: list[Tensor], draw: random.Random, *, averages: bool) -> list[Tensor]:
    """What each of as many ranks as there are messages has in the end."""
    memories, found = memories_of(len(messages)), [message.clone() for message in messages]
    ranks = [Rank(rank, memories) for rank in range(len(messages))]
    for rank, message in zip(ranks, found, strict=True):
        rank.reduce(message, partial(added, rank=rank.rank, averages=averages))
    run_all(ranks, draw)
    return found
