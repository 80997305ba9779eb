"""A program's graph in the hands of user code: handed out as a GraphModule, taken back as a program that is checked.

[Note: which edits count]
A GraphModule runs the code of its last ``recompile()``, so an edit of ``gm.graph`` without it changes nothing that
runs. It is the same here: the program stays as it was, and a warning says so.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.functionalize.functionalize import functional_call
from wholestep.errors import ConfigError, InternalError
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import Program
from wholestep.ir.verifier import verify

log = logging.getLogger("wholestep")

_CALLS = ("call_function", "call_method", "call_module")


class GraphExchange:
    """A copy of a program whose GraphModule, `module`, user code may edit or exchange."""

    def __init__(self, program: Program) -> None:
        own = graph_edit.copy(program)
        # A plain one, whose Python is written: `recompile()` is what makes an edit count.
        self._original, self._copy = program, replace(own, module=fx.GraphModule(own.module, own.graph))
        self._code = self.module.code
        self._known = {node.name: _signature(node) for node in self._copy.graph.nodes}

    @property
    def module(self) -> fx.GraphModule:
        """The module that user code gets."""
        return self._copy.module

    def to_program(self, returned: Any, author: str) -> Program:
        """The program with the graph that user code gave back.

        Raises:
            ConfigError: it is no graph, or one that cannot be part of a step; `author` is named.
        """
        if isinstance(returned, fx.Graph):
            returned = self.module if returned is self.module.graph else fx.GraphModule(self.module, returned)
        if not isinstance(returned, fx.GraphModule):
            raise ConfigError(f"{author} gave {type(returned).__name__}, wanted a GraphModule such as it was given.")
        if returned is self.module and returned.code == self._code:
            if returned.graph.python_code("self").src != self._code:
                log.warning(
                    "%s edited gm.graph without gm.recompile(), so what runs is unchanged. "
                    "Call gm.recompile() for the edit to count.", author,
                )  # fmt: skip
            return self._original
        try:
            self._complete(returned, author)
            returned.recompile()
            program = replace(self._copy, module=returned)
            verify(program)
        except InternalError as error:
            raise ConfigError(f"The graph that {author} gave back cannot run as a step: {error}") from error
        return program

    def _complete(self, module: fx.GraphModule, author: str) -> None:
        """Gives every node that is new, or reads one that is, its value; calls of Python become operators."""
        graph = module.graph
        placeholders = graph.find_nodes(op="placeholder")
        if len(placeholders) != len(self._copy.inputs):
            raise ConfigError(
                f"{author} left {len(placeholders)} placeholders of {len(self._copy.inputs)}. "
                f"Keep all of them, in order; an input that nobody reads is allowed."
            )
        for new, old in zip(placeholders, self._copy.placeholders, strict=True):
            node_meta.copy_meta(old, new)
        mode = node_meta.fake_mode(graph)
        changed: set[fx.Node] = set()
        for node in list(graph.nodes):
            same = self._known.get(node.name) == _signature(node) and node_meta.value(node) is not None
            if node.op == "get_attr" and not same:
                attribute = getattr(module, str(node.target))
                node_meta.set_value(
                    node, mode.from_tensor(attribute) if isinstance(attribute, torch.Tensor) else attribute
                )
            elif node.op in _CALLS and (not same or not changed.isdisjoint(node.all_input_nodes)):
                changed.update(_evaluate(module, node, author))


def _signature(node: fx.Node) -> tuple[Any, ...]:
    """The identity of a call: operator and arguments, nodes by name."""
    return (node.op, node.target, str(node.args), str(node.kwargs))


def _evaluate(module: fx.GraphModule, node: fx.Node, author: str) -> list[fx.Node]:
    """Computes the value of a call, or replaces it by operators with values. The nodes that stand for it."""
    if op_info.mutated_args(node.target):
        raise ConfigError(
            f"{author} added {node.name} ({node.target}), which writes to an argument. Graphs are functional here: use "
            f"the operator that returns a new tensor; what runs in place is decided later."
        )
    if node.op == "call_function" and (op_info.is_op(node) or _is_of_python(node)):
        graph_edit.evaluate(node)
        return [node]
    return _expand(module, node, author)


def _is_of_python(node: fx.Node) -> bool:
    """Whether the call is arithmetic on numbers or takes an item of a list: graphs have those as they are."""
    values = [node_meta.value(source) for source in node.all_input_nodes]
    if node.target is operator.getitem:
        return isinstance(values[0], (list, tuple))
    return not any(isinstance(value, (torch.Tensor, list, tuple)) for value in values)


def _expand(module: fx.GraphModule, node: fx.Node, author: str) -> list[fx.Node]:
    """Replaces a call of a Python function, method or submodule by the operators that it consists of."""
    sources = list(dict.fromkeys(node.all_input_nodes))
    values = [node_meta.value(source) for source in sources]
    if not all(isinstance(value, torch.Tensor) for value in values):
        raise ConfigError(
            f"{author} added {node.name} ({node.target}), which reads numbers or lists of the graph. Only operators "
            f"(torch.ops.aten...) can do that: call one."
        )

    def call(*tensors: torch.Tensor) -> Any:
        given = dict(zip(sources, tensors, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: given[arg])
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        function: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        return function(*args, **kwargs)

    try:
        inner = functional_call(call, values, node_meta.fake_mode(module.graph))
    except Exception as error:
        raise ConfigError(f"{author} added {node.name} ({node.target}), which cannot be called so: {error}") from error
    if any(op_info.mutated_args(one.target) or one.op == "get_attr" for one in inner.graph.nodes):
        raise ConfigError(
            f"{author} added {node.name} ({node.target}), which writes to an argument or has tensors of its own. "
            f"Call functions that return new tensors, and take tensors from the graph."
        )
    with module.graph.inserting_before(node):
        copies = dict(zip(inner.graph.find_nodes(op="placeholder"), sources, strict=True))
        result = module.graph.graph_copy(inner.graph, copies)
    node.replace_all_uses_with(result)  # type: ignore[arg-type]
    module.graph.erase_node(node)
    return list(graph_edit.nodes_of(result))
