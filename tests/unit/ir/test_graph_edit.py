"""Editing a graph: many nodes replaced at once."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.fx as fx

from wholestep.errors import InternalError
from wholestep.ir import graph_edit

_aten = torch.ops.aten


def _sums(count: int) -> tuple[fx.Graph, list[fx.Node], list[fx.Node]]:
    """A graph with `count` inputs, and as many sums that all results and a list read."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{place}") for place in range(count)]
    sums = [graph.call_function(operator.add, (one, one)) for one in inputs]
    scaled = graph.call_function(_aten._foreach_mul.Scalar, (sums, 2), {})
    named = graph.call_function(torch.cat, (), {"tensors": sums, "dim": 0})
    graph.output((tuple(sums), scaled, named))
    return graph, inputs, sums


def test_nodes_replaced_at_once_are_nodes_replaced_one_by_one() -> None:
    draw = random.Random(7)
    for _ in range(20):
        texts = []
        chosen = {place: draw.choice([0, place]) for place in draw.sample(range(8), 5)}
        for at_once in (True, False):
            graph, inputs, sums = _sums(8)
            replaced = {sums[old]: inputs[new] for old, new in chosen.items()}
            if at_once:
                graph_edit.replace_nodes(replaced)
            else:
                for old, new in replaced.items():
                    old.replace_all_uses_with(new)
                    graph.erase_node(old)
            graph.lint()
            texts.append(str(graph))
        assert texts[0] == texts[1]


def test_what_replaces_a_node_may_be_replaced_itself() -> None:
    graph, inputs, sums = _sums(3)
    graph_edit.replace_nodes({sums[2]: sums[1], sums[1]: sums[0], sums[0]: inputs[0]})
    graph.lint()
    assert graph.output_node().args[0][0] == (inputs[0],) * 3  # type: ignore[index]
    assert not graph.find_nodes(op="call_function", target=operator.add)


def test_a_node_that_reads_another_replaced_one_goes_with_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    one = graph.call_function(operator.neg, (x,))
    two = graph.call_function(operator.neg, (one,))
    graph.output((two, one))
    graph_edit.replace_nodes({one: x, two: x})
    graph.lint()
    assert graph.output_node().args == ((x, x),)
    assert list(x.users) == [graph.output_node()]


def test_each_reader_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer's lists and the results of a step are as long as the model has parameters: one by one, that is
    quadratic."""
    _, inputs, sums = _sums(50)
    written: list[Any] = []
    plain = fx.node.map_arg
    monkeypatch.setattr(fx.node, "map_arg", lambda *args: written.append(args) or plain(*args))
    graph_edit.replace_nodes(dict(zip(sums, inputs, strict=True)))
    assert len(written) == 3


def test_sorting_keeps_the_order_of_random_numbers_or_says_that_it_cannot():
    """`first` waits for what stands after `second`, which then waits too."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.5))
    second = graph.call_function(torch.ops.aten.bernoulli.p, (x, 0.25))
    late = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output((first, second))
    first.args = (late, 0.5)
    graph_edit.sort_topologically(graph)
    graph.lint()
    order = list(graph.nodes)
    assert order.index(late) < order.index(first) < order.index(second)
    late.args = (second,)
    with pytest.raises(InternalError, match="nodes that wait for each other"):
        graph_edit.sort_topologically(graph)
