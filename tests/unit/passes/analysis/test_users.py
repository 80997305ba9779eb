"""Readers through views, and what views are views of."""

from __future__ import annotations

import torch

from tests.unit import builders
from wholestep.passes.analysis.users import base, readers_through_views, view_chain


def test_readers_come_with_the_view_that_they_read():
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        double = x + x
        return double.view(4).view(2, 2).exp(), double.sin()

    program = builders.capture(fn, [torch.ones(2, 2)])
    add, first, second, exp, sin = (node for node in program.graph.nodes if node.op == "call_function")
    assert set(readers_through_views(add)) == {(exp, second), (sin, add)}
    assert set(readers_through_views(add, lambda node: False)) == {(first, add), (sin, add)}
    assert list(view_chain(second)) == [second, first, add]
    assert list(view_chain(add)) == [add]
    assert (base(second), base(exp)) == (add, exp)
