"""What a process group says of itself; who is asked to let go before one ends, and by whom that is noticed."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import destroy_process_group  # as users import it, before anything of ours runs

from wholestep.runtime.distributed import process_group


class Graph:
    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []

    def release_group(self, group: str) -> None:
        self.asked.append((group, dist.is_initialized()))


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_it_lets_go_before_the_groups_end(group):
    graph = Graph()
    process_group.release_before_teardown(graph)
    other = dist.new_group([0])
    names = other.group_name, group.group_name
    destroy_process_group(other)
    assert graph.asked == [(names[0], True)]
    destroy_process_group()
    assert graph.asked == [(name, True) for name in names]


def test_once_however_many_hold_something(group):
    graphs = [Graph() for _ in range(3)]
    for graph in graphs:
        process_group.release_before_teardown(graph)
    destroy_process_group()
    assert [len(graph.asked) for graph in graphs] == [1, 1, 1]


def test_what_is_gone_is_not_kept(group):
    asked = (graph := Graph()).asked
    process_group.release_before_teardown(graph)
    del graph
    gc.collect()
    destroy_process_group()
    assert asked == []
