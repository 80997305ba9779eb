"""Fitting the loops of kernels to each other forgets no order of theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import dependencies, scheduler
from torch.utils._ordered_set import OrderedSet

from tests.fuzz.random_writes import RandomWrites
from wholestep.lower.inductor.war_order import keep_write_order

NODE: Any = scheduler.SchedulerNode
LOST = 0
"""The seed of a step in which ``torch.compile`` of torch 2.11 writes to an input before its last reader."""


class Node:
    """What Inductor knows of a kernel."""

    def __init__(self, *reads: Any) -> None:
        self.mutation_renames, self.num_set = {"arg": "buf1"}, 0
        self.set_read_writes(self.made(*reads))
        self.num_set = 0

    @staticmethod
    def made(*reads: Any) -> Any:
        return dependencies.ReadWrites(OrderedSet(reads), OrderedSet(), OrderedSet())

    def set_read_writes(self, known: Any) -> None:
        self.read_writes, self.num_set = known, self.num_set + 1


def test_dependencies_that_no_load_shows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    order, read = dependencies.WeakDep("buf0", "buf2"), dependencies.StarDep("arg")

    def forget(node: Any, **named: Any) -> None:
        node.read_writes = node.made(read)

    monkeypatch.setattr(NODE, "recompute_size_and_body", forget)
    node = Node(order, dependencies.StarDep("buf1"))
    with keep_write_order():
        NODE.recompute_size_and_body(node)
    assert list(node.read_writes.reads) == [dependencies.StarDep("buf1"), order]  # and arg is known by its new name
    assert NODE.recompute_size_and_body is forget


def test_nothing_is_done_where_nothing_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NODE, "recompute_size_and_body", lambda node, **named: None)
    node = Node(dependencies.WeakDep("buf0", "buf2"))
    with keep_write_order():
        NODE.recompute_size_and_body(node)
    assert not node.num_set


def test_a_write_stays_behind_what_reads() -> None:
    made, device = RandomWrites(LOST), torch.device("cpu")
    wanted = made.run(device)
    torch._dynamo.reset()
    with keep_write_order(), inductor_config.patch(fx_graph_cache=False):
        found = made.run(device, torch.compile)
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(partial(torch.allclose, rtol=1e-12, atol=1e-12), ours, theirs))
