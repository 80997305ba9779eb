"""emit_promises(graph, env): what the trace took for granted of sizes that are data, checked when the graph runs.

``logits[mask] + bias_of_four_rows`` is traced as an addition without broadcasting: torch notes that the mask has to
select four rows. Where it selects another number, the graph is that of another step. Nothing is written before a check.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from wholestep.capture.sizes.size_symbols import SizeEnv
from wholestep.errors import CaptureError
from wholestep.ir import node_meta
from wholestep.ir.ops.assertions import CHECK
from wholestep.ir.size_nodes import computed_node

_SIZE = torch.ops.aten.sym_size.int


def emit_promises(graph: fx.Graph, env: SizeEnv) -> int:
    """Puts a call of `CHECK` after the sizes of each promise. Gives how many.

    Raises CaptureError for one about a size that no tensor of the graph has.
    """
    found = dict.fromkeys(one.expr for some in env.deferred_runtime_asserts.values() for one in some)
    promises = [one for one in found if all(symbol.is_integer for symbol in one.free_symbols)]  # others are no sizes
    if not promises:
        return 0
    sizes = _sizes(graph, {symbol for one in promises for symbol in one.free_symbols})
    for promise in promises:
        if missing := promise.free_symbols - sizes.keys():
            raise CaptureError(f"The step counts on {promise}, and no tensor has the size {missing.pop()}.")
        _emit(graph, promise, {symbol: sizes[symbol] for symbol in promise.free_symbols})
    return len(promises)


def _sizes(graph: fx.Graph, symbols: set[Any]) -> dict[Any, fx.Node]:
    """For each symbol the first node that is it, or the size of a tensor that is it. Such sizes are read by new nodes.

    (A symbol for which torch knows a number by now is told by the expression that its size was made with.)
    """
    found: dict[Any, fx.Node] = {}
    last = max((node for node in graph.nodes if node.op == "placeholder"), default=None)
    for node in list(graph.nodes):
        value = node_meta.value(node) if node.op in ("placeholder", "call_function") else None
        sizes = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for dim, size in enumerate(sizes):
            symbol = size.node._expr if isinstance(size, torch.SymInt) else None
            if symbol in symbols and symbol not in found:
                found[symbol] = node
                if isinstance(value, torch.Tensor):
                    with graph.inserting_after(last if node.op == "placeholder" else node):
                        found[symbol] = graph.call_function(_SIZE, (node, dim))
                    node_meta.set_value(found[symbol], size)
                    node_meta.set_origin(found[symbol], node_meta.origin(node))
    return found


def _text(promise: Any, sizes: dict[Any, fx.Node]) -> str:
    names = []
    for symbol, node in sorted(sizes.items(), key=lambda item: str(item[0])):
        tensor, where = (node.args[0], f"dim {node.args[1]} of ") if node.target is _SIZE else (node, "")
        line = node_meta.origin(node).source
        names.append(f"{symbol} is {where}{tensor}{f', {line}' if line else ''}")
    return f"The step counts on {promise}, which does not hold ({'; '.join(names)})."


def _emit(graph: fx.Graph, promise: Any, sizes: dict[Any, fx.Node]) -> None:
    behind = max(sizes.values())
    with graph.inserting_before(behind.next):
        truth = computed_node(graph, promise, sizes)
        check = graph.call_function(CHECK, (truth, True, "builtins:RuntimeError", _text(promise, sizes)))
    node_meta.set_origin(check, node_meta.origin(behind))
