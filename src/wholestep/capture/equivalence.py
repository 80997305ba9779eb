"""Whether a trace with inputs in the place of numbers is the trace with the numbers, but for those.

A symbol is no ``int``: ``isinstance(beta, float)`` and ``type(number) is int`` are false for it, in anybody's code, and
nobody is told. So what was computed is compared, call by call.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from wholestep.capture.bind.captured import Captured, ResultSink
from wholestep.capture.python.snapshot import same
from wholestep.ir import node_meta


def is_equivalent(plain: Captured, found: Captured) -> bool:
    """Whether both do the same calls on tensors. `found` may have a number of the graph for a constant of `plain`."""
    one, other = plain.spec, found.spec
    if one.result_spec != other.result_spec:
        return False
    filled = {sink.leaf for spec in (one, other) for sink in spec.outputs if isinstance(sink, ResultSink)}
    pairs = zip(one.leaves, other.leaves, strict=True)
    if not all(same(a, b) or a == b for place, (a, b) in enumerate(pairs) if place not in filled):
        return False
    twins: dict[fx.Node, fx.Node] = {}
    hosts = _host(plain) | _host(found)
    calls, others = ([n for n in _calls(captured) if n not in hosts] for captured in (plain, found))
    if len(calls) != len(others):
        return False
    for a, b in zip(calls, others, strict=True):
        if a.target is not b.target:
            return False
        leaves, those = (pytree.tree_leaves((node.args, node.kwargs)) for node in (a, b))
        pairs = zip(leaves, those, strict=False)
        if len(leaves) != len(those) or not all(_fits(x, y, twins, hosts) for x, y in pairs):
            return False
        twins[a] = b
    return True


def _calls(captured: Captured) -> list[fx.Node]:
    return [node for node in captured.program.graph.nodes if node.op == "call_function"]


def _host(captured: Captured) -> set[fx.Node]:
    """Arithmetic of numbers: calls that give numbers, or tensors of one number on the CPU made of nothing but those."""
    found: set[fx.Node] = set()
    for node in captured.program.graph.nodes:
        made_of_numbers = all(arg in found or arg.op == "placeholder" for arg in node.all_input_nodes)
        if _is_number(node) or (made_of_numbers and _is_small(node) and all(map(_is_small, node.all_input_nodes))):
            found.add(node)
    return found


def _is_number(node: fx.Node) -> bool:
    return isinstance(node_meta.value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_small(node: fx.Node) -> bool:
    value = node_meta.value(node)
    return _is_number(node) or (isinstance(value, torch.Tensor) and value.dim() == 0 and value.device.type == "cpu")


def _fits(a: Any, b: Any, twins: dict[fx.Node, fx.Node], hosts: set[fx.Node]) -> bool:
    """Whether two arguments are the same; a number of the graph may stand for a constant."""
    if isinstance(b, fx.Node) and b in hosts:
        return isinstance(a, (int, float)) or a in hosts
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return twins[a] is b if a in twins else a.op == b.op and a.op != "call_function"
    return same(a, b) or (type(a) is type(b) and bool(a == b))
