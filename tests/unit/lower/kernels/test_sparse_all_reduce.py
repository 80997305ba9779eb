"""Gradients of tables by rows: the algorithm on simulated streams of ranks, and kernels by Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.unit.lower import triton_interpreter
from tests.unit.lower.stream_simulator import MAIN, Rank, added, memories_of, run_all
from wholestep.lower.kernels import copy_all_reduce, sparse_all_reduce
from wholestep.lower.kernels.sparse_all_reduce import WHOLE, Layout, OnGPU, all_reduce_rows, most_rows

ROWS, WIDTH = 40, 8
"""Of the tables; with `small_memory` a slot of 3 ranks has room for 14 of their rows."""


@pytest.fixture(autouse=True)
def small_memory(monkeypatch):
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 2048)


@dataclass(frozen=True)
class OnCPU:
    """The kernels, by operators of torch."""

    rank: int
    averages: bool

    def pack(self, table: Tensor, indices: Tensor, slot: Tensor, layout: Layout) -> None:
        head = layout.indices(slot)
        head[0] = len(indices)
        head[32 : 32 + len(indices)] = indices
        layout.rows(slot)[: len(indices)] = table[indices.long()]

    def add(self, table: Tensor, memories: Sequence[Tensor], layout: Layout) -> None:
        tables = []
        for rank, memory in enumerate(memories):
            slot = layout.slot(memories[self.rank], rank)
            count = int(layout.indices(slot)[0])
            one = layout.whole(memory).clone() if count == WHOLE else torch.zeros_like(table)
            if count > 0:
                one[layout.indices(slot)[32 : 32 + count].long()] = layout.rows(slot)[:count]
            tables.append(table.clone() if rank == self.rank else one)
        added(
            torch.stack(tables), table.clone(), table, torch.empty_like(table), rank=self.rank, averages=self.averages
        )


def table_of(indices: Tensor | None, draw: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randint(-1000, 1000, (ROWS, WIDTH), generator=draw).to(dtype)
    if indices is not None:
        values[~torch.isin(torch.arange(ROWS), indices)] = 0
    return values


def batches(counts: Sequence[int | None], seed: int) -> tuple[list[Tensor | None], list[Tensor]]:
    """Of each rank indices, with repetitions, and the table; None: a table with no zeros."""
    draw = torch.Generator().manual_seed(seed)
    indices = [None if one is None else torch.randint(ROWS, (one,), generator=draw) for one in counts]
    return indices, [table_of(one, draw) for one in indices]


def start(rank: Rank, table: Tensor, indices: Tensor | None) -> None:
    rank.wait(copy_all_reduce.WIRE, MAIN)
    all_reduce_rows(table, indices, rank, OnCPU(rank.rank, averages=False))
    rank.wait(MAIN, copy_all_reduce.WIRE)


COUNTS = [(5, 9, 3), (0, 1, 14), (0, 0, 0), (4, 15, 2), (None, 6, 7), (25, None, 30)]
"""Rows of three ranks: few, none, as many as there is room for, and more."""


def test_there_is_room_for_what_the_cases_say():
    assert Layout.of((ROWS, WIDTH), torch.float32, 3).capacity == 14


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_every_rank_has_the_sum_in_every_order_that_streams_allow(counts, one_queue: bool):
    """Also where ranks have gone on to another step, with other rows, and dense messages stand before and after."""
    for seed in range(15):
        memories = memories_of(3)
        ranks, seen = [Rank(rank, memories) for rank in range(3)], list[tuple[Tensor, Tensor]]()
        for step in range(2):
            indices, tables = batches(counts if step else (7, 2, 11), 2 * seed + step)
            messages = [torch.randint(-99, 99, (700,)).float() for _ in ranks]
            sums = sum(tables), sum(messages)
            for rank, table, index, message in zip(ranks, tables, indices, messages, strict=True):
                rank.reduce(message, partial(added, rank=rank.rank, averages=False))
                start(rank, table, index)
                rank.run(MAIN, partial(note, seen, table, sums[0]))
                rank.run(MAIN, partial(table.fill_, torch.nan))  # whoever reads it still has wrong sums
                rank.reduce(message, partial(added, rank=rank.rank, averages=False))
                rank.wait(MAIN, copy_all_reduce.WIRE)
                rank.run(MAIN, partial(note, seen, message, 3 * sums[1]))
                rank.end_of_graph()
        run_all(ranks, random.Random(seed), one_queue=one_queue)
        assert len(seen) == 12
        assert all(torch.equal(one, wanted) for one, wanted in seen), f"seed {seed}"


def note(seen: list[tuple[Tensor, Tensor]], found: Tensor, wanted: Tensor) -> None:
    seen.append((found.clone(), wanted))


@pytest.mark.parametrize("left_out", [0, 1, 2])
def test_every_meeting_is_needed(left_out: int, monkeypatch):
    """Before the push, between it and the addition, and after that. Dense messages use the same memory."""
    for seed in range(100):
        memories, wrong = memories_of(3), list[tuple[Tensor, Tensor]]()
        ranks = [Rank(rank, memories) for rank in range(3)]
        for _ in range(2):
            indices, tables = batches((7, 15, 11), seed)
            total, messages = sum(tables), [torch.randint(-99, 99, (500,)).float() for _ in ranks]
            for rank, table, index, message in zip(ranks, tables, indices, messages, strict=True):
                rank.reduce(message, partial(added, rank=rank.rank, averages=False))
                rank.run(copy_all_reduce.WIRE, partial(note, wrong, message, sum(messages)))
                before = len(rank.given)
                start(rank, table, index)
                del_meeting(rank, before, left_out)
                rank.run(MAIN, partial(note, wrong, table, total))
        try:
            run_all(ranks, random.Random(seed))
        except (RuntimeError, IndexError):  # of numbers of rows that are none
            return
        if not all(torch.equal(one, wanted) for one, wanted in wrong):
            return
    pytest.fail("no order in which that meeting was needed")


def del_meeting(rank: Rank, before: int, number: int) -> None:
    """Turns one of the meetings that a rank was given from an index on into work that does nothing."""
    rendezvous = [at for at in range(before, len(rank.given)) if rank.given[at].work is None]
    assert len(rendezvous) == 3
    at = rendezvous[number]
    one = rank.given[at]
    rank.given[at] = type(one)(stream=one.stream, work=lambda: None, behind=one.behind)


def test_what_is_sent_is_what_was_looked_up(monkeypatch):
    sent: list[int] = []
    copy = copy_all_reduce.copy
    monkeypatch.setattr(
        copy_all_reduce, "copy", lambda target, source: (sent.append(source.nbytes), copy(target, source))
    )
    for counts, wanted in [((5, 5, 5), 5 * WIDTH * 4), ((0, 0, 0), 0)]:
        indices, tables = batches(counts, 1)
        memories, layout = memories_of(3), Layout.of((ROWS, WIDTH), torch.float32, 3)
        ranks = [Rank(rank, memories) for rank in range(3)]
        for rank, table, index in zip(ranks, tables, indices, strict=True):
            start(rank, table, index)
        sent.clear()
        run_all(ranks, random.Random(0))
        assert sent == [layout.rows_start + wanted] * 6


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_slots_neither_meet_nor_end_behind_the_memory(ranks: int, dtype: torch.dtype, monkeypatch):
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 160 << 20)
    layout = Layout.of((50_304, 768), dtype, ranks)
    memory = torch.empty(copy_all_reduce.memory_bytes(ranks), dtype=torch.uint8, device="meta")
    assert layout.capacity > 0
    assert layout.whole(memory).nbytes <= layout.slots_start
    for rank in range(ranks):
        slot = layout.slot(memory, rank)
        assert slot.nbytes == layout.slot_bytes
        assert slot.storage_offset() == layout.slots_start + rank * layout.slot_bytes
        assert layout.indices(slot).numel() >= 32 + layout.capacity
        assert layout.rows(slot).shape == (layout.capacity, 768)
        assert layout.rows(slot).storage_offset() * dtype.itemsize % 128 == 0
        assert layout.used_bytes(layout.capacity) <= layout.slot_bytes


def test_rows_pay_where_they_are_few_of_a_large_table(monkeypatch):
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 160 << 20)
    assert most_rows((50_304, 768), torch.float32, 4) == 50_304 // 4
    assert most_rows((50_304, 768), torch.float32, 2) == 50_304 // 2
    assert 0 < most_rows((50_304, 768), torch.float32, 8) <= 50_304 // 8
    assert most_rows((1024, 768), torch.float32, 4) == 0  # positions
    assert most_rows((200_000, 768), torch.float32, 4) == 0  # there is no room for the whole
    assert most_rows((50_304 * 768,), torch.float32, 4) == 0


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("counts", [(5, 9, 3), (1, 0, 18), (4, None, 2), (None, 6, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_kernels_do_what_operators_of_torch_do(counts, dtype: torch.dtype, averages: bool, monkeypatch):
    interpreter = triton_interpreter.prepare(monkeypatch)
    for name in ("_pack", "_place", "_add"):
        kernel = interpreter.InterpretedFunction(getattr(sparse_all_reduce, name))
        monkeypatch.setattr(sparse_all_reduce, f"{name}_kernel", kernel)
    monkeypatch.setattr(sparse_all_reduce, "_BLOCK", 4)  # two a row
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 4096)
    indices, tables = batches(counts, 3)
    tables = [table.to(dtype) / 8 for table in tables]
    layout, results = Layout.of((ROWS, WIDTH), dtype, 3), list[list[Tensor]]()
    for on_gpu in (False, True):
        memories, found = memories_of(3), [table.clone() for table in tables]
        ranks = [Rank(rank, memories) for rank in range(3)]
        for rank, table, index in zip(ranks, found, indices, strict=True):
            places = torch.empty(ROWS, 3, dtype=torch.int32)
            kernels = OnGPU(rank=rank.rank, averages=averages, places=places)
            ints = None if index is None else index.to(torch.int32)
            all_reduce_rows(table, ints, rank, kernels if on_gpu else OnCPU(rank.rank, averages))
        run_all(ranks, random.Random(1))
        results.append(found)
    assert layout.capacity >= 18
    for wanted, one in zip(*results, strict=True):
        # Sums are exact; a third is rounded in two ways.
        torch.testing.assert_close(one, wanted, rtol=2 * torch.finfo(dtype).eps if averages else 0, atol=0)
    assert all(torch.equal(one, results[1][0]) for one in results[1])
