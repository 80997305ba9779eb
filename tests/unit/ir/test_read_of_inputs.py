"""Sizes of what a graph computes become sizes of its inputs."""

from __future__ import annotations

import operator

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.ir import node_meta, size_nodes

aten = torch.ops.aten


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
