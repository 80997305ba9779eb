"""Gradients of embeddings as rows: when they pay, which travel so, and what becomes of the graph and the numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import nn

import wholestep as ws
from tests.unit.capture.steps import captured
from wholestep.config import DDP, CastCompress
from wholestep.cost.model import CostModel
from wholestep.lower import inductor
from wholestep.passes.cleanup import cleanup
from wholestep.passes.compress import compress
from wholestep.passes.dedupe import dedupe
from wholestep.passes.default import passes_of
from wholestep.passes.pipeline import run_passes
from wholestep.passes.rows import ENOUGH, SUM_ROWS, Message, send_rows
from wholestep.place.strategies import place
from wholestep.program import meta, ops, show
from wholestep.program.program import MeshAxis, Program
from wholestep.report.explain import explain

aten = torch.ops.aten
AXIS = MeshAxis(name="data", size=2, group="0")
COST = CostModel.default("cpu+gloo")
NODES = CostModel.default("h200+nvlink")
WORDS, WIDTH, LIMIT = 60_000, 16, 14
GATHER = ops.c10d.all_gather_into_tensor.default


def message(words: int, width: int, rows: int, ranks: int) -> Message:
    return Message(num_rows=words, width=width, itemsize=4, limit=rows, ranks=ranks)


@pytest.mark.parametrize(
    ("one", "cost", "pays"),
    [
        (message(50_304, 768, 1024, 4), NODES, True),
        (message(50_304, 768, 8192, 4), NODES, True),
        (message(50_304, 768, 8192, 8), NODES, False),  # as many bytes as the table
        (message(32_000, 2048, 8192, 4), NODES, False),
        (message(1024, 768, 1024, 4), NODES, False),  # positions
        (message(256, 128, 64, 2), NODES, False),
        (message(256, 128, 64, 2), COST, False),  # two starts cost more than a share of a bucket
        (message(WORDS, WIDTH, LIMIT, 2), COST, True),
    ],
)
def test_rows_travel_where_they_are_faster_by_far(one, cost, pays):
    assert (one.rows_us(cost) <= ENOUGH * one.table_us(cost)) is pays


def test_more_rows_take_longer_and_a_larger_table_does():
    one = message(50_304, 768, 1024, 4)
    assert message(50_304, 768, 2048, 4).rows_us(NODES) > one.rows_us(NODES)
    assert message(100_000, 768, 1024, 4).table_us(NODES) > one.table_us(NODES)
    assert message(100_000, 768, 1024, 4).rows_us(NODES) == one.rows_us(NODES)


class Net(nn.Module):
    """Words -> their mean -> five numbers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, **options)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words).mean(1))


class Tied(Net):
    """The table is an output layer, too."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return super().forward(words) + (self.words(words).mean(1) @ self.words.weight[:5].t())


class Hooked(Net):
    """What travels is not what the look-up gives."""

    def __init__(self) -> None:
        super().__init__()
        self.words.weight.register_hook(lambda grad: grad + 1)


class Watched(Net):
    """The norm of this rank's gradient is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("norm", torch.zeros(()))
        self.words.weight.register_hook(self.watch)

    def watch(self, grad: torch.Tensor) -> None:
        self.norm.copy_(grad.norm())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> torch.Tensor:
    loss = model(words).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, words: torch.Tensor) -> None:
    for part in words.chunk(2):
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def words_of(rows: int, length: int = 4) -> torch.Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(rows))


def placed(model: nn.Module, words: torch.Tensor, step: Callable[..., Any] = train, **options: Any) -> Program:
    program = captured(step, model, torch.optim.SGD(model.parameters(), lr=0.1), words).program
    return run_passes(place(program, DDP(**options), AXIS), [cleanup, dedupe])


def with_rows(program: Program, limit: int = LIMIT, cost: CostModel = COST) -> Program:
    return run_passes(program, [partial(send_rows, cost=cost, limit=limit)])


def planned(model: nn.Module, words: torch.Tensor, **options: Any) -> Program:
    return run_passes(placed(model, words), passes_of(cost=COST, embedding_rows=LIMIT, **options))


def calls(program: Program, target: Any) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def sent_bytes(program: Program) -> int:
    """Bytes that one rank gives to all collectives."""
    return sum(meta.num_bytes(node.args[0]) for node in program.graph.nodes if ops.is_collective(node))


def test_two_all_gathers_and_a_sum_take_the_place_of_the_table():
    before = placed(Net(), words_of(3))
    after = with_rows(before)
    indices, rows = calls(after, GATHER)
    (total,) = calls(after, SUM_ROWS)
    assert not calls(after, aten.embedding_dense_backward.default)
    assert sent_bytes(before) == 4 * (WORDS * WIDTH + 5 * WIDTH + 5)
    assert sent_bytes(after) == LIMIT * (4 * WIDTH + 8) + 4 * (5 * WIDTH + 5)
    assert meta.tensor(indices).dtype is torch.int64
    assert meta.tensor(rows).shape == (2 * LIMIT, WIDTH)
    assert meta.tensor(total).shape == (WORDS, WIDTH)
    assert meta.bucket(rows).members == ("words.weight",)
    (note,) = after.history[-1].notes
    assert note.startswith("words.weight travels as rows: predicted ")
    assert note.endswith("us (1.8 KiB of rows, 3.7 MiB of table)")


@pytest.mark.parametrize(
    ("make", "step"),
    [(Tied, train), (Hooked, train), (Watched, train), (partial(Net, scale_grad_by_freq=True), train),
     (Net, accumulate)],
    ids=["also an output layer", "changed by a hook", "read by a hook", "by frequency", "accumulated"],
)  # fmt: skip
def test_a_gradient_that_is_more_than_one_look_up_travels_whole(make, step):
    before = placed(make(), words_of(2), step)
    after = with_rows(before)
    assert not calls(after, GATHER)
    assert show.plan_text(after) == show.plan_text(before)


def test_a_table_that_is_as_fast_travels_whole_and_the_note_says_so():
    after = with_rows(placed(Net(), words_of(3)), limit=100_000)
    assert not calls(after, GATHER)
    (note,) = after.history[-1].notes
    assert note.startswith("words.weight travels whole: predicted ")


def test_the_plan_is_the_same_for_every_batch():
    plans = {show.plan_text(planned(Net(), words_of(rows))) for rows in (1, 2, 3)}
    assert len(plans) == 1
    assert f"all_gather_into_tensor float32[{LIMIT * WIDTH}]" in plans.pop()


def test_more_rows_than_the_users_word_are_refused_with_the_users_line():
    line = inspect.getsourcelines(Net.forward)[1] + 1
    with pytest.raises(ws.ConfigError, match=rf"embedding_rows=14.* 16 of words.weight \(.*test_rows.py:{line}\)"):
        with_rows(placed(Net(), words_of(4)))


@pytest.mark.parametrize("limit", [0, -1, 2.0, True, "auto"])
def test_the_users_word_is_a_number(limit):
    with pytest.raises(ws.ConfigError, match=r"DDP\(embedding_rows=...\) wants the number of rows"):
        DDP(embedding_rows=limit)


class Two(Net):
    """Two tables for the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head((self.words(words) + self.more(words)).mean(1))


def test_the_same_indices_travel_once():
    after = with_rows(placed(Two(), words_of(3)))
    assert [str(meta.tensor(node).dtype) for node in calls(after, GATHER)].count("torch.int64") == 1
    assert len(calls(after, SUM_ROWS)) == 2


def test_indices_travel_from_the_start_and_are_waited_for_at_the_end():
    program = planned(Net(), words_of(3))
    order = {node: number for number, node in enumerate(program.graph.nodes)}
    indices, rows = calls(program, GATHER)
    assert order[indices] < order[calls(program, aten.embedding.default)[0]]
    (reduced,) = (node for node in order if ops.is_collective(node) and node not in (indices, rows))
    waits = [ops.waits(node)[0] for node in (reduced, rows, indices)]
    assert order[rows] < min(map(order.__getitem__, waits))
    assert order[waits[0]] < order[waits[1]]  # the norms of the others meanwhile
    assert max(map(order.__getitem__, waits)) + 1 == order[calls(program, SUM_ROWS)[0]]


def test_rows_are_not_compressed():
    program = planned(Net(), words_of(3), compress=partial(compress, how=CastCompress(torch.bfloat16)))
    carried = [str(meta.tensor(node).dtype) for node in program.graph.nodes if ops.is_collective(node)]
    assert carried == ["torch.int64", "torch.bfloat16", "torch.float32"]


def test_the_table_of_collectives_shows_them():
    said = explain(planned(Net(), words_of(3)), step="train", strategy="DDP", backend="eager", cost=COST)
    shown = {one.op: one for one in said.collectives if one.members == ("words.weight",)}
    assert shown["all_gather_into_tensor"].num_bytes == LIMIT * 4 * WIDTH
    assert shown["all_gather_into_tensor"].gradient_bytes == 4 * WORDS * WIDTH
    assert "indices of the rows of words.weight" in [one.reason for one in said.collectives]


def test_the_sum_adds_row_by_row_and_leaves_out_the_padding():
    draw = torch.Generator().manual_seed(0)
    rows, indices = torch.randn(40, 3, generator=draw), torch.randint(5, (40,), generator=draw)
    wanted = torch.zeros(6, 3)
    for row, index in zip(rows, indices.tolist(), strict=True):
        wanted[index] += row if index != 2 else 0
    assert torch.equal(SUM_ROWS(rows, indices, 6, 2), wanted)
    torch.library.opcheck(SUM_ROWS, (rows, indices, 6, 2), test_utils=("test_schema", "test_faketensor"))


def test_a_small_type_is_rounded_once():
    rows, indices = torch.randn(40, 3).bfloat16(), torch.randint(5, (40,))
    wanted = SUM_ROWS(rows.float(), indices, 6, -1).bfloat16()
    assert torch.equal(SUM_ROWS(rows, indices, 6, -1), wanted)


def test_no_compiler_gets_the_sum():
    """Inductor would add with atomics, in another order on every rank."""
    (total,) = calls(with_rows(placed(Net(), words_of(3))), SUM_ROWS)
    assert not inductor.compiles(total)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 7}], ids=["plain", "padding"])
def test_virtual_ranks_find_what_eager_ones_do(ranks, options):
    torch.manual_seed(0)
    model = Net(**options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.randint(20, (ranks, 4))  # few words: they repeat within ranks and among them
    step = ws.compile(train, strategy=DDP(embedding_rows=6), backend="eager")
    found = step.verify(model, optimizer, words, ranks=ranks)
    found.raise_if_failed()
