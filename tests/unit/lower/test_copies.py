"""All-reduce by copies: the algorithm, by threads that see each other's memory, and which reductions take it."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import gradient
from wholestep.cost.model import CostModel
from wholestep.lower import copies
from wholestep.passes import by_copies
from wholestep.passes.average import average_on_the_way
from wholestep.passes.by_copies import reduce_by_copies
from wholestep.passes.default import passes_of
from wholestep.passes.pipeline import run_passes
from wholestep.program import ops
from wholestep.program.collectives import ALL_REDUCE_BY_COPIES_
from wholestep.program.program import Program

CPU = torch.device("cpu")


class Threads:
    """A rank of a group of threads."""

    def __init__(self, rank: int, memories: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(memories)
        self._memories, self._barrier = memories, barrier

    def memory(self, rank: int, dtype: torch.dtype) -> Tensor:
        return self._memories[rank].view(dtype)

    def meet(self) -> None:
        self._barrier.wait(timeout=10)


def added(slots: Tensor, own: Tensor, result: Tensor, *, rank: int, averages: bool) -> None:
    """What `wholestep.lower.addition` does, by operators of torch."""
    wide = torch.float64 if own.dtype is torch.float64 else torch.float32
    total = torch.zeros_like(own, dtype=wide)
    for other, slot in enumerate(slots):
        total = total + (own if other == rank else slot).to(wide)
    own.copy_(total / len(slots) if averages else total)
    result.copy_(own)


def reduced(messages: list[Tensor], *, averages: bool) -> list[Tensor]:
    """What each of as many threads as there are messages has in the end."""
    size = len(messages)
    num_bytes = (size + 1) * copies.part_length(size, torch.uint8)
    memories = [torch.full((num_bytes,), 255, dtype=torch.uint8) for _ in messages]  # NaN, wherever it is not written
    barrier = threading.Barrier(size)
    found = [message.clone() for message in messages]
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            copies.all_reduce(
                found[rank], Threads(rank, memories, barrier), partial(added, rank=rank, averages=averages)
            )
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 31, 32 * 8, 1000, 4096, 10_001])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size: int, length: int, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 8192)
    messages = [torch.randn(length) for _ in range(size)]
    wanted = messages[0]
    for message in messages[1:]:
        wanted = wanted + message
    for found in reduced(messages, averages=False):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_means_round_once(dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 8192)
    messages = [torch.randn(3000).to(dtype) for _ in range(4)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = sum(message.to(wide) for message in messages) / 4
    for found in reduced(messages, averages=True):
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("length", [1, 31, 1000, 4096, 10_001])
def test_pieces_are_few_and_their_parts_aligned(length: int, monkeypatch):
    monkeypatch.setattr(copies, "PIECE_BYTES", 8192)
    message, most = torch.arange(length), copies.part_length(4, torch.int64)
    pieces = [list(parts) for parts in copies._cut(message, 4, most)]
    assert len(pieces) == -(-length // (4 * most))
    assert torch.equal(torch.cat([part for parts in pieces for part in parts]), message)
    starts = [part.storage_offset() for parts in pieces for part in parts if part.numel()]
    assert all(start * 8 % copies._ALIGNED_BYTES == 0 for start in starts)
    assert max(part.numel() for parts in pieces for part in parts) <= most


def linear(x, y):
    return gradient(y.t() @ x, "weight"), gradient(y.sum(0), "bias")


def planned(reason: str, bucket_bytes: int = 1 << 20) -> Program:
    placed = builders.place(builders.capture(linear, [torch.randn(6, 40), torch.randn(6, 30)]))
    lowering = [
        partial(average_on_the_way, averages=lambda group, device: True),
        partial(reduce_by_copies, why_not=lambda group, device: reason),
    ]
    cost = CostModel.default("cpu+gloo")
    return run_passes(placed, passes_of(cost=cost, bucket_bytes=bucket_bytes, lowering=lowering))


def test_a_large_bucket_is_reduced_by_copies_in_place(monkeypatch):
    monkeypatch.setattr(by_copies, "MIN_BYTES", 1000)
    program = planned("")
    (start,) = (node for node in program.graph.nodes if ops.is_collective(node))
    assert start.target is ALL_REDUCE_BY_COPIES_
    assert start.args[1] == "avg"
    assert [note for record in program.history for note in record.notes if "copy engines" in note] == [
        "1 reductions by copy engines (4.8 KiB), 0 not"
    ]


def test_small_ones_and_those_of_other_groups_stay(monkeypatch):
    monkeypatch.setattr(by_copies, "MIN_BYTES", 1000)
    starts = [node for node in planned("", bucket_bytes=1).graph.nodes if ops.is_collective(node)]
    assert sorted(node.target is ALL_REDUCE_BY_COPIES_ for node in starts) == [False, True]
    program = planned("ranks are on several hosts")
    assert not any(node.target is ALL_REDUCE_BY_COPIES_ for node in program.graph.nodes)
    assert any("several hosts" in note for record in program.history for note in record.notes)


def test_gloo_does_not_reduce_by_copies():
    assert copies.why_not("0", CPU) == "the group does not use NCCL"


def test_memory_is_that_of_the_group_which_has_the_name_now(monkeypatch):
    groups = {"0": object()}
    made = []

    class Group:
        def __init__(self, group: object, device: torch.device) -> None:
            self.group = group
            made.append(group)

    monkeypatch.setattr(copies, "group_named", groups.__getitem__)
    monkeypatch.setattr(copies, "_Group", Group)
    monkeypatch.setattr(copies, "_groups", {})
    first = copies._group_of("0", CPU)
    assert copies._group_of("0", CPU) is first
    groups["0"] = object()  # the process group was destroyed, and another one made
    assert copies._group_of("0", CPU) is not first
    assert len(made) == 2
