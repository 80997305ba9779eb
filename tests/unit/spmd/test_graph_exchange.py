"""Graphs in the hands of user code: which edits count, what new nodes may be, what is refused."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from wholestep.errors import ConfigError
from wholestep.ir import node_meta
from wholestep.spmd import compile

aten = torch.ops.aten


def compiled(
    transformation: Callable[[fx.GraphModule], Any], after: Callable[[Tensor], Tensor] = Tensor.detach
) -> tuple[Tensor, fx.GraphModule]:
    """The result of ``tanh(x @ w)`` for ones, with its graph in the hands of `transformation`; and the graph."""
    mod = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        mod.weight.copy_(torch.eye(2))

    @compile(gm_transformation=transformation)
    def forward(mod: nn.Module, x: Tensor) -> Tensor:
        return after(torch.tanh(mod(x)))

    result = forward(mod, torch.ones(2, 2))
    return result, forward._compiled_obj.gm


def ran(transformation: Callable[[fx.GraphModule], Any]) -> Tensor:
    return compiled(transformation)[0]


def at_the_tanh(edit: Callable[[fx.Graph, fx.Node], None]) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """An edit of the graph right before its tanh, which counts."""

    def transformation(gm: fx.GraphModule) -> fx.GraphModule:
        (tanh,) = gm.graph.find_nodes(op="call_function", target=aten.tanh.default)
        with gm.graph.inserting_before(tanh):
            edit(gm.graph, tanh)
        gm.graph.lint()
        gm.recompile()
        return gm

    return transformation


def swap(target: Any, *rest: Any, op: str = "call_function") -> Callable[[fx.GraphModule], fx.GraphModule]:
    """Replaces the tanh by a call of `target` on what it read."""

    def edit(graph: fx.Graph, tanh: fx.Node) -> None:
        tanh.replace_all_uses_with(graph.create_node(op, target, (*tanh.args, *rest)))
        graph.erase_node(tanh)

    return at_the_tanh(edit)


@pytest.mark.parametrize(
    "transformation",
    [
        swap(aten.mul.Tensor, 3.0), swap(torch.mul, 3.0), swap(operator.mul, 3.0), swap("mul", 3.0, op="call_method"),
        swap(aten.mul, 3.0), swap(lambda x: (x + x) + x),
    ],
    ids=["operator", "function", "python", "method", "packet", "lambda"],
)  # fmt: skip
def test_new_nodes_run(transformation: Callable[[fx.GraphModule], fx.GraphModule]) -> None:
    assert torch.equal(ran(transformation), torch.full((2, 2), 3.0))


def test_what_reads_a_new_node_is_computed_anew() -> None:
    """The shape changes on the way, so recorded values after the new node must, too."""

    def edit(graph: fx.Graph, tanh: fx.Node) -> None:
        tanh.args = (graph.call_function(torch.cat, ([tanh.args[0], tanh.args[0]],)),)

    result, gm = compiled(at_the_tanh(edit), after=lambda x: x.detach().exp().neg())
    (returned,) = gm.graph.output_node().args[0]
    assert result.shape == node_meta.tensor(returned).shape == (4, 2)
    assert "neg" in str(returned.target), "a node that was not touched itself"


def test_a_list_of_parts_is_opened() -> None:
    def edit(graph: fx.Graph, tanh: fx.Node) -> None:
        chunks = graph.call_function(torch.chunk, (tanh.args[0], 2))
        tanh.args = (graph.call_function(operator.getitem, (chunks, 1)),)

    assert ran(at_the_tanh(edit)).shape == (1, 2)


def test_an_edit_without_recompile_warns_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def transformation(gm: fx.GraphModule) -> fx.GraphModule:
        for node in gm.graph.find_nodes(op="call_function", target=aten.tanh.default):
            node.target = aten.neg.default
        return gm

    with caplog.at_level(logging.WARNING, "wholestep"):
        assert torch.equal(ran(transformation), torch.tanh(torch.ones(2, 2)))
    assert "gm_transformation edited gm.graph without gm.recompile()" in caplog.text


def test_no_edit_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "wholestep"):
        ran(lambda gm: gm)
    assert caplog.text == ""


@pytest.mark.parametrize("give", [lambda gm: gm.graph, lambda gm: fx.GraphModule(gm, gm.graph)], ids=["graph", "new"])
def test_a_graph_or_another_module_may_come_back(give: Callable[[fx.GraphModule], Any]) -> None:
    triple = swap(aten.mul.Tensor, 3.0)
    assert torch.equal(ran(lambda gm: give(triple(gm))), torch.full((2, 2), 3.0))


def drops_an_input(gm: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    return fx.GraphModule(gm, graph)


def returns_more(gm: fx.GraphModule) -> fx.GraphModule:
    output = gm.graph.output_node()
    output.args = ((*output.args[0], *output.args[0]),)
    gm.recompile()
    return gm


@pytest.mark.parametrize(
    ("transformation", "told"),
    [
        (lambda gm: None, "gave NoneType, wanted a GraphModule"),
        (swap(aten.mul_.Tensor, 3.0), "writes to an argument"),
        (swap("mul_", 3.0, op="call_method"), "writes to an argument"),
        (swap(torch.mul), "cannot be called so"),
        (drops_an_input, "1 placeholders of 2"),
        (returns_more, "2 results for 1 outputs"),
    ],
)
def test_what_cannot_run_is_refused_by_name(transformation: Callable[[fx.GraphModule], Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        ran(transformation)
    assert "gm_transformation" in str(caught.value)
