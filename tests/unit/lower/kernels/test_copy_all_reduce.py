"""All-reduce by copies: the algorithm, on simulated streams of ranks, and which reductions take it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import gradient
from tests.unit.lower.stream_simulator import MAIN, Rank, added, memories_of, reduced, run_all
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.ops.collectives import ALL_REDUCE_BY_COPIES_
from wholestep.ir.program import Program
from wholestep.lower.kernels import add_chunks, copy_all_reduce
from wholestep.passes.comm.fold_mean import fold_mean
from wholestep.passes.comm.use_copy_engine import use_copy_engine
from wholestep.passes.default_passes import passes_of
from wholestep.passes.pass_manager import run_passes

CPU = torch.device("cpu")


def small_pieces(monkeypatch):
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 8192)
    monkeypatch.setattr(copy_all_reduce, "SPLIT_BYTES", 2048)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("length", [0, 1, 31, 32 * 8, 1000, 4096, 10_001])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size: int, length: int, monkeypatch):
    small_pieces(monkeypatch)
    messages = [torch.randn(length) for _ in range(size)]
    wanted = messages[0]
    for message in messages[1:]:
        wanted = wanted + message
    for found in reduced(messages, random.Random(size), averages=False):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("averages", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 1000, 10_001])
def test_half_precision_is_given_as_its_exact_sum_in_float32(
    length: int, dtype: torch.dtype, averages: bool, monkeypatch
):
    small_pieces(monkeypatch)
    messages, memories = [torch.randn(length).to(dtype) for _ in range(3)], memories_of(3)
    before = [message.clone() for message in messages]
    wanted = torch.zeros(length)
    for message in messages:
        wanted = wanted + message.float()
    results = [torch.full((length,), torch.nan) for _ in messages]
    ranks = [Rank(rank, memories) for rank in range(3)]
    for rank, message, result in zip(ranks, messages, results, strict=True):
        rank.reduce(message, partial(added, rank=rank.rank, averages=averages), result)
    run_all(ranks, random.Random(length))
    assert all(torch.equal(result, wanted / 3 if averages else wanted) for result in results)
    assert all(torch.equal(message, one) for message, one in zip(messages, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_means_round_once(dtype: torch.dtype, monkeypatch):
    small_pieces(monkeypatch)
    messages = [torch.randn(3000).to(dtype) for _ in range(4)]
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = sum(message.to(wide) for message in messages) / 4
    for found in reduced(messages, random.Random(4), averages=True):
        assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("itemsize", [8, 4, 2])
@pytest.mark.parametrize("count", [3, 4, 7])
def test_no_part_is_longer_than_its_slot(count: int, itemsize: int, split: bool, monkeypatch):
    """Whatever the length is, and also where a slot holds no whole number of aligned parts of a smaller type."""
    small_pieces(monkeypatch)
    slot = copy_all_reduce.chunk_length(count, torch.int64)
    for length in range(1, 3 * count * slot, 37):
        result = torch.arange(length)
        parts = [part for parts in copy_all_reduce._cut(result, count, itemsize, split=split) for part in parts]
        assert all(part.stop - part.start <= slot for part in parts)
        assert torch.equal(torch.cat([result[part] for part in parts]), result)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("itemsize", [8, 4])
@pytest.mark.parametrize("length", [1, 31, 255, 256, 1000, 4096, 10_001])
def test_pieces_are_few_and_even_and_their_parts_aligned(length: int, itemsize: int, split: bool, monkeypatch):
    small_pieces(monkeypatch)
    result, most = torch.arange(length), copy_all_reduce.chunk_length(4, torch.int64)
    pieces = [[result[part] for part in parts] for parts in copy_all_reduce._cut(result, 4, itemsize, split=split)]
    assert len(pieces) == (2 * -(-length // (8 * most)) if split and length >= 256 else -(-length // (4 * most)))
    assert torch.equal(torch.cat([part for parts in pieces for part in parts]), result)
    starts = [part.storage_offset() for parts in pieces for part in parts if part.numel()]
    assert all(start * itemsize % copy_all_reduce._ALIGNED_BYTES == 0 for start in starts)
    assert max(part.numel() for parts in pieces for part in parts) <= most


LENGTHS = (700, 100, 0, 1300, 200)
"""Of messages one after the other, in pieces of 256 elements at most: 4, 1, 0, 6 and 2 of them."""


def steps_of_messages(
    size: int, without: Sequence[tuple[int, int]] = (), *, split: bool = True
) -> tuple[list[Rank], list[list[Tensor]]]:
    """Ranks that reduce messages one after the other, and what each of them reads after its waits.

    Messages are written right before they are reduced, all waits stand at the end of a step, and all steps have the
    same memory for messages. The second step is another graph.
    """
    memories = memories_of(size)
    ranks = [Rank(rank, memories, without) for rank in range(size)]
    seen: list[list[Tensor]] = [[] for _ in ranks]
    for rank, found in zip(ranks, seen, strict=True):
        messages = [torch.full((length,), torch.nan) for length in LENGTHS]
        for step in range(2):
            for number, message in enumerate(messages):
                rank.run(MAIN, partial(message.copy_, values(rank.rank, step, number)))
                rank.reduce(message, partial(added, rank=rank.rank, averages=False), split=split)
            rank.wait(MAIN, copy_all_reduce.WIRE)
            for message in messages:
                rank.run(MAIN, partial(note, found, message))
            rank.end_of_graph()
    return ranks, seen


def note(found: list[Tensor], message: Tensor) -> None:
    found.append(message.clone())


def values(rank: int, step: int, number: int) -> Tensor:
    """Small integers, whose sums are exact."""
    draw = torch.Generator().manual_seed(1000 * rank + 100 * step + number)
    return torch.randint(-1000, 1000, (LENGTHS[number],), generator=draw).float()


def all_have_the_sums(seen: list[list[Tensor]]) -> bool:
    sums = [
        sum(values(rank, step, number) for rank in range(len(seen)))
        for step in range(2)
        for number in range(len(LENGTHS))
    ]
    return all(torch.equal(one, wanted) for found in seen for one, wanted in zip(found, sums, strict=True))


def tiny_pieces(monkeypatch):
    monkeypatch.setattr(copy_all_reduce, "PIECE_BYTES", 1024)
    monkeypatch.setattr(copy_all_reduce, "SPLIT_BYTES", 512)


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_right_in_every_order_that_streams_allow(size: int, split: bool, one_queue: bool, monkeypatch):
    tiny_pieces(monkeypatch)
    for seed in range(20):
        ranks, seen = steps_of_messages(size, split=split)
        run_all(ranks, random.Random(seed), one_queue=one_queue)
        assert all_have_the_sums(seen), f"seed {seed}"


@pytest.mark.parametrize("length", [100, 700, 1300])
def test_pieces_are_there_behind_their_events(length: int, monkeypatch):
    tiny_pieces(monkeypatch)
    for seed in range(20):
        draw, memories = torch.Generator().manual_seed(seed), memories_of(3)
        messages = [torch.randint(-1000, 1000, (length,), generator=draw).float() for _ in range(3)]
        wanted = sum(messages)
        ranks, stops, seen = [Rank(rank, memories) for rank in range(3)], [], []
        for rank, message in zip(ranks, messages, strict=True):
            pieces = rank.reduce(message, partial(added, rank=rank.rank, averages=False))
            stops = [stop for stop, _ in pieces]
            for stop, mark in pieces:
                rank.wait_for(MAIN, mark)
                rank.run(MAIN, partial(note, seen, message[:stop]))
            rank.run(MAIN, partial(message.fill_, torch.nan))  # whoever still reads it sends that to others
        run_all(ranks, random.Random(seed))
        assert len(seen) == 3 * len(stops)
        assert all(torch.equal(one, wanted[: len(one)]) for one in seen)
        assert stops[-1] == length
        assert stops == sorted({len(one) for one in seen})


@pytest.mark.parametrize("length", [100, 1300])
def test_additions_fork_off_the_wire_where_somebody_waits_for_pieces(length: int, monkeypatch):
    """And nowhere else: a message is one chain then, for which a CUDA graph needs one queue."""
    tiny_pieces(monkeypatch)
    for split, wanted in [(False, {copy_all_reduce.WIRE}), (True, {copy_all_reduce.WIRE, copy_all_reduce.ADD})]:
        rank = Rank(0, memories_of(3))
        rank.reduce(torch.zeros(length), partial(added, rank=0, averages=False), split=split)
        assert {given.stream for given in rank.given} == wanted
        chain = all(given.behind <= {number - 1} for number, given in enumerate(rank.given))
        assert chain is not split


WAITS = [
    [(copy_all_reduce.ADD, copy_all_reduce.WIRE)],
    [(copy_all_reduce.WIRE, copy_all_reduce.ADD)],
    [(stream, MAIN) for stream in range(copy_all_reduce.NUM_STREAMS)],
]


@pytest.mark.parametrize("without", WAITS)
def test_every_wait_is_needed(without: Sequence[tuple[int, int]], monkeypatch):
    tiny_pieces(monkeypatch)
    for seed in range(50):
        ranks, seen = steps_of_messages(3, without)
        run_all(ranks, random.Random(seed))
        if not all_have_the_sums(seen):
            return
    pytest.fail("no order in which that wait was needed")


@pytest.mark.parametrize(("num_pieces", "wanted"), [
    (0, ""), (1, "p0 - l0"), (2, "p0 p1 l0 l1"), (4, "p0 p1 l0 p2 l1 p3 l2 l3"),
])  # fmt: skip
def test_a_piece_is_pushed_before_the_one_in_front_of_it_is_pulled(num_pieces: int, wanted: str):
    phases = [
        "-" if pushed is pulled is None else f"p{pushed}" if pulled is None else f"l{pulled}"
        for pushed, pulled in copy_all_reduce._phases(num_pieces)
    ]
    assert " ".join(phases) == wanted


def test_meetings_on_two_streams_could_stand_still(monkeypatch):
    tiny_pieces(monkeypatch)

    def stands_still(seed: int) -> bool:
        ranks = [Rank(rank, memories_of(2)) for rank in range(2)]
        for rank in ranks:
            rank.meet(copy_all_reduce.ADD)
            rank.meet(copy_all_reduce.WIRE)
        try:
            run_all(ranks, random.Random(seed), one_queue=True)
        except AssertionError:
            return True
        return False

    assert any(map(stands_still, range(10)))


def linear(x, y):
    return gradient(y.t() @ x, "weight"), gradient(y.sum(0), "bias")


def planned(reason: str, bucket_bytes: int = 1 << 20) -> Program:
    placed = builders.place(builders.capture(linear, [torch.randn(6, 40), torch.randn(6, 30)]))
    lowering = [
        partial(fold_mean, averages=lambda group, device: True),
        partial(use_copy_engine, why_not=lambda group, device: reason),
    ]
    cost = CostModel.default("cpu+gloo")
    return run_passes(placed, passes_of(cost=cost, bucket_bytes=bucket_bytes, lowering=lowering))


def test_a_large_bucket_is_reduced_by_copies_in_place(monkeypatch):
    monkeypatch.setattr("wholestep.passes.comm.use_copy_engine.MIN_BYTES", 1000)
    program = planned("")
    (start,) = (node for node in program.graph.nodes if op_info.is_collective(node))
    assert start.target is ALL_REDUCE_BY_COPIES_
    assert start.args[1] == "avg"
    assert [note for record in program.history for note in record.notes if "copy engines" in note] == [
        "1 reductions by copy engines (4.8 KiB), 0 not"
    ]


def test_small_ones_and_those_of_other_groups_stay(monkeypatch):
    monkeypatch.setattr("wholestep.passes.comm.use_copy_engine.MIN_BYTES", 1000)
    starts = [node for node in planned("", bucket_bytes=1).graph.nodes if op_info.is_collective(node)]
    assert sorted(node.target is ALL_REDUCE_BY_COPIES_ for node in starts) == [False, True]
    program = planned("ranks are on several hosts")
    assert not any(node.target is ALL_REDUCE_BY_COPIES_ for node in program.graph.nodes)
    assert any("several hosts" in note for record in program.history for note in record.notes)


def test_gloo_does_not_reduce_by_copies():
    assert copy_all_reduce.why_not("0", CPU) == "the group does not use NCCL"


def test_memory_is_that_of_the_group_which_has_the_name_now(monkeypatch):
    groups = {"0": object()}
    made = []

    class Group:
        def __init__(self, group: object, device: torch.device) -> None:
            self.group = group
            made.append(group)

    monkeypatch.setattr(copy_all_reduce, "group_named", groups.__getitem__)
    monkeypatch.setattr(copy_all_reduce, "_Group", Group)
    monkeypatch.setattr(copy_all_reduce, "_groups", {})
    first = copy_all_reduce.group_of("0", CPU)
    assert copy_all_reduce.group_of("0", CPU) is first
    groups["0"] = object()  # the process group was destroyed, and another one made
    assert copy_all_reduce.group_of("0", CPU) is not first
    assert len(made) == 2


def test_the_addition_of_equal_messages_is_built_once(monkeypatch):
    """As it is launched for them: for this rank among so many, and for sums or means."""
    monkeypatch.setattr("wholestep.passes.comm.use_copy_engine.MIN_BYTES", 1000)
    program = planned("", bucket_bytes=1)
    (start,) = program.graph.find_nodes(op="call_function", target=ALL_REDUCE_BY_COPIES_)
    with program.graph.inserting_after(start):
        again = program.graph.node_copy(start, lambda node: node)
    node_meta.set_value(again, node_meta.tensor(start))
    asked = []
    monkeypatch.setattr(copy_all_reduce, "group_named", lambda name: SimpleNamespace(size=lambda: 4, rank=lambda: 3))
    monkeypatch.setattr(add_chunks, "build", lambda *dtypes, **how: asked.append((dtypes, how)))
    assert len(list(copy_all_reduce.builds(program))) == 1
    assert asked == [((torch.float32, torch.float32), {"size": 4, "rank": 3, "averages": True})]
    assert list(copy_all_reduce.builds(planned("ranks are on several hosts"))) == []
