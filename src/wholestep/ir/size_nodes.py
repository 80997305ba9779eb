"""Sizes that move as nodes: a pass gives a call the sizes of its values, and the graph computes them of its inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from wholestep.errors import InternalError
from wholestep.ir import node_meta
from wholestep.ir.sizes import is_of_arguments, numbers_of, symbols_of

_SIZE, _STRIDE = torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int


def read_of_inputs(graph: fx.Graph) -> int:
    """Has sizes that are read of what the graph computes be computed from those of its inputs, where they can be: they
    are known at the start. Gives how many."""
    done: dict[Any, fx.Node] = {}
    reads = [node for node in graph.find_nodes(op="call_function", target=_SIZE) if node.args[0].op != "placeholder"]
    found = [node for node in reads if _is_computable(node_meta.value(node))]
    for node in sorted(found):
        size = node_meta.value(node)
        if size.node.expr not in done:
            with graph.inserting_before(node):
                done[size.node.expr] = size_node(graph, size)
        node.replace_all_uses_with(done[size.node.expr])
        graph.erase_node(node)
    return len(found)


def _is_computable(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and is_of_arguments(size) and bool(size.node.expr.free_symbols)


def is_read_of_input(node: fx.Node) -> bool:
    """Whether a call reads a size or a stride of an input: it is known before anything runs."""
    return node.target in (_SIZE, _STRIDE) and node.args[0].op == "placeholder"  # type: ignore[union-attr]


def size_argument(graph: fx.Graph, size: Any) -> fx.Node | int:
    """A symbolic size as an argument of a call: its node, or the number that it has turned out to be."""
    return size_node(graph, size) if size.node.expr.free_symbols else int(size.node.expr)


def size_node(graph: fx.Graph, size: Any) -> fx.Node:
    """The node that gives a symbolic size: calls at the insertion point, of sizes that are read where they appear.

    Raises InternalError for a size of which no value of the graph before that point tells.
    """
    expression = size.node.expr
    symbols = {symbol: _read(graph, symbol) for symbol in sorted(expression.free_symbols, key=str)}
    return computed_node(graph, expression, symbols)


def computed_node(graph: fx.Graph, expression: Any, symbols: Mapping[Any, fx.Node]) -> fx.Node:
    """The node that gives an expression of torch's sympy: calls at the insertion point, of nodes for its symbols."""
    tracer, before = fx.proxy.GraphAppendingTracer(graph), set(graph.nodes)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    made: Any = sympy_interp(_NodeAnalysis, proxies, expression)
    for node in graph.nodes:
        if node not in before:
            args: Any = fx.node.map_arg(node.args, node_meta.value)
            node_meta.set_value(node, node.target(*args))
    found: fx.Node = made.node
    return found


class _NodeAnalysis(PythonReferenceAnalysis):
    """Functions of sizes as calls of a graph: torch's own turn some into expressions, or ask for their numbers."""

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _called(torch.sym_int, x)

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _called(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _called(math.ceil, x)

    @staticmethod
    def round_to_int(a: Any, dtype: Any) -> Any:
        return _called(round, a)

    @staticmethod
    def trunc(x: Any) -> Any:
        return _called(torch.sym_float, _called(torch.sym_int, x))

    @staticmethod
    def floor(x: Any) -> Any:
        return _called(torch.sym_float, _called(math.floor, x))

    @staticmethod
    def ceil(x: Any) -> Any:
        return _called(torch.sym_float, _called(math.ceil, x))

    @staticmethod
    def round_decimal(a: Any, b: Any) -> Any:
        return _called(round, a, b)

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return _called(torch.sym_ite, condition, a, b)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    proxy = next((one for one in args if isinstance(one, fx.Proxy)), None)
    return function(*args) if proxy is None else proxy.tracer.create_proxy("call_function", function, args, {})


class SymbolNodes:
    """The nodes that give the symbols of sizes: calls after the inputs of a graph, once each."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._nodes: dict[Any, fx.Node] = {}

    def __call__(self, values: Sequence[Any]) -> list[fx.Node]:
        """One per symbol in the sizes of these values, less those which are among them. Raises as `size_node`."""
        given = {one.node.expr for one in values if isinstance(one, torch.SymInt)}
        symbols = symbols_of(number for one in values for number in numbers_of(one))
        return [self._node(symbol) for symbol in symbols if symbol not in given]

    def _node(self, symbol: Any) -> fx.Node:
        if symbol not in self._nodes:
            self._nodes[symbol] = _read(self._graph, symbol)
        return self._nodes[symbol]


def _read(graph: fx.Graph, symbol: Any) -> fx.Node:
    node: fx.Node
    for node in graph.nodes:
        for read_by, dim, size in _sizes(node_meta.value(node)):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                if read_by is None:
                    return node
                known = next((user for user in node.users if user.target is read_by and user.args[1] == dim), None)
                if known is not None:
                    _last_placeholder(node).append(known)
                    return known
                with graph.inserting_after(_last_placeholder(node)):
                    read: fx.Node = graph.call_function(read_by, (node, dim))
                node_meta.set_value(read, size)
                node_meta.set_origin(read, node_meta.origin(node))
                return read
    raise InternalError(f"no value of the graph has the size {symbol}")


def _sizes(value: Any) -> Iterator[tuple[Any, int, Any]]:
    """Sizes and strides of a value, each with the operator that reads it and the dim; a size as it is, with None."""
    if isinstance(value, torch.SymInt):
        yield None, 0, value
    elif isinstance(value, torch.Tensor):
        yield from ((_SIZE, dim, size) for dim, size in enumerate(value.shape))
        yield from ((_STRIDE, dim, stride) for dim, stride in enumerate(value.stride()))


def _last_placeholder(node: fx.Node) -> fx.Node:
    """Calls stand after all placeholders."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return node
