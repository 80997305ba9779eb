"""Sizes as nodes of a graph: those of what it computes become sizes of its inputs, and functions of them are calls."""

from __future__ import annotations

import operator

import pytest
import sympy
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._sympy import functions

from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.ir import node_meta, size_nodes

aten = torch.ops.aten
SIZE = sympy.Symbol("size", integer=True, positive=True)


def test_sizes_are_read_of_inputs_once_each() -> None:
    env = SizeEnv()
    x = env.fake(FakeTensorMode(shape_env=env), torch.empty(6, 4), "args.0", [0])
    graph = fx.Graph()
    given = graph.placeholder("x")
    twice = graph.call_function(aten.cat.default, ([given, given],))
    sizes = [graph.call_function(aten.sym_size.int, (one, 0)) for one in (twice, given, twice)]
    filled = graph.call_function(aten.full.default, (sizes, 1.0))
    graph.output((filled,))
    values = {given: x, twice: aten.cat.default([x, x]), **dict.fromkeys((sizes[0], sizes[2]), 2 * x.shape[0])}
    for node, value in (values | {sizes[1]: x.shape[0]}).items():
        node_meta.set_value(node, value)
    assert size_nodes.read_of_inputs(graph) == 2
    assert [node.target for node in graph.nodes][1:3] == [aten.sym_size.int, aten.cat.default]
    assert [node.target for node in graph.nodes].count(operator.mul) == 1
    assert [node.args[0] for node in graph.find_nodes(op="call_function", target=aten.sym_size.int)] == [given]
    assert size_nodes.read_of_inputs(graph) == 0
    graph.lint()
    (found,) = fx.GraphModule(torch.nn.Module(), graph)(torch.empty(3, 4))
    assert found.shape == (6, 3, 6)


HALF = functions.FloatTrueDiv(functions.ToFloat(SIZE), sympy.Float(2.6))
EXPRESSIONS = (
    functions.TruncToInt(HALF), functions.FloorToInt(HALF), functions.CeilToInt(HALF), functions.RoundToInt(HALF),
    functions.TruncToInt(functions.TruncToFloat(HALF)), functions.TruncToInt(functions.RoundDecimal(HALF, 1)),
    functions.TruncToInt(functions.IntTrueDiv(SIZE, 3)), functions.FloorDiv(SIZE, 3), functions.Mod(SIZE, 3),
    functions.Max(SIZE, 3), functions.Min(SIZE, 3), functions.LShift(SIZE, 2), SIZE**2,
    functions.Where(sympy.Gt(SIZE, 4), SIZE, 2 * SIZE),
)  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=str)
def test_functions_of_sizes_are_calls(expression: sympy.Expr) -> None:
    """As ``interpolate(scale_factor=1.7)`` gives them."""
    graph, env = fx.Graph(), SizeEnv()
    given = graph.placeholder("size")
    x = env.fake(FakeTensorMode(shape_env=env), torch.empty(7, 4), "args.0", [0])
    node_meta.set_value(given, x.shape[0])
    own = expression.xreplace({SIZE: x.shape[0].node.expr})
    graph.output(size_nodes.computed_node(graph, own, {x.shape[0].node.expr: given}))
    run = fx.GraphModule(torch.nn.Module(), graph)
    assert [run(size) for size in (7, 3, 12)] == [expression.xreplace({SIZE: size}) for size in (7, 3, 12)]
