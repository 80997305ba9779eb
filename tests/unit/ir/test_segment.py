"""A segment that runs node by node: which results it gives, and which it stores."""

import functools

import torch
import torch.fx as fx

from wholestep.ir.segment import Segment


def test_a_stored_result_is_written_to_its_argument_and_none_stands_in_its_place():
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    double = graph.call_function(torch.ops.aten.mul.Tensor, (x, 2.0))
    moved = graph.call_function(torch.ops.aten.add.Tensor, (weight, double))
    graph.output((double, moved))
    segment = Segment(name="run", read=functools.cache(lambda: fx.GraphModule({}, graph)), stored=((1, 1),))
    held = torch.tensor([10.0, 20.0])
    arguments = [torch.tensor([1.0, 2.0]), held]
    given, stored = segment(arguments)
    assert stored is None
    assert given.tolist() == [2.0, 4.0]
    assert held.tolist() == [12.0, 24.0]
    assert arguments == []  # what nobody else holds is freed inside
