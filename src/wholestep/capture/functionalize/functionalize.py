"""Makes a traced graph functional: no operation writes, what changes is returned.

Where all that is written to is written to as a whole, calls in place become their functional forms
(`wholestep.capture.functionalize.outplace`). Elsewhere a second trace under torch's functionalization does the work,
for the calls that writes concern; the others are copied (`wholestep.capture.functionalize.mutation_subgraph`). Two more
things are ours: operators outside ATen that write to their arguments (torch refuses those) get a functional twin first,
and the ``copy_`` calls at the end, which put new values into inputs, become outputs.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_innermost_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from wholestep.capture.functionalize.constants import known_to_fakes
from wholestep.capture.functionalize.mutation_subgraph import mutation_subgraph, splice
from wholestep.capture.functionalize.outplace import to_out_of_place
from wholestep.capture.functionalize.storage_resize import fold_resizes
from wholestep.capture.python.modules_left_alone import modules_left_alone
from wholestep.capture.python.node_origin import node_hook
from wholestep.capture.scalars.host_scalars import HostValues, Known, host_branches, kernels_branch
from wholestep.errors import CaptureError
from wholestep.ir import graph_edit, node_meta, op_info, serializer
from wholestep.ir.lazy_graph_module import unwritten
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.ops.library import LIBRARY

_TWINS = torch.library.Library("wholestep_functional", "DEF")
_known_twins: dict[Any, Any] = {}


@dataclass(slots=True)
class Functional:
    """A functional graph: the original's results, and new values of inputs written to."""

    module: fx.GraphModule
    results: list[Any]
    writes: dict[int, fx.Node]


def functionalize(
    traced: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode, known: Known, numbers: Mapping[Any, float]
) -> Functional:
    """The functional form of `traced`, with values and origins on its nodes.

    Args:
        traced: a graph of ATen operators that may write to its inputs; returns a flat list.
        inputs: fake tensors and symbols of ranks, one per placeholder.
        mode: the fake mode they live in.
        known: per placeholder the real value of a host number, or None.
        numbers: values of the symbols that stand for host numbers.
    """
    keep_random_layout(traced.graph)
    replace_custom_writes(traced.graph)
    plain = [_detached(one) for one in inputs]
    with kernels_branch(numbers):
        found = to_out_of_place(traced, plain)
        made = _retrace(traced, plain, mode, known) if found is None else Functional(*found)
    for op in _REPLACED_BY_FUNCTORCH:
        for node in made.module.graph.find_nodes(op="call_function", target=functional_twin(op, ())):
            node.target = op
    return made


def _retrace(traced: fx.GraphModule, inputs: list[Any], mode: FakeTensorMode, known: Known) -> Functional:
    subgraph = mutation_subgraph(traced)
    interpreter = _OriginKeeper(subgraph.module)
    plain = [*inputs, *(_detached(node_meta.value(one)) for one in subgraph.entering)]
    known = [*known, *(None for _ in subgraph.entering)]
    host: list[HostValues] = []

    def run(*args: Any) -> Any:
        host[:] = [HostValues.of_trace(known)]
        return torch.func.functionalize(lambda *inner: interpreter.run(*inner), remove="mutations")(*args)

    branches = host_branches(lambda: host[0] if host else None)
    with (
        mode, known_to_fakes(), without_autocast(), unwritten(), modules_left_alone(), node_hook(interpreter.tag),
        branches,
    ):  # fmt: skip
        functional = make_fx(run, _disable_torch_fn_metadata_mode=True)(*plain)
    module = splice(traced, subgraph, functional, interpreter.made_for)
    fold_resizes(module.graph)
    return _take_writes(module)


def functional_call(call: Callable[..., Any], inputs: list[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """``call(*inputs)`` as a graph of ATen operators, for code that rewrites a captured graph.

    Args:
        call: takes and returns tensors.
        inputs: fake tensors of `mode`, one per placeholder.
    """
    with mode, torch.no_grad():
        return make_fx(torch.func.functionalize(call, remove="mutations"))(*inputs)


class _OriginKeeper(fx.Interpreter):
    """Runs a graph and hands the origin of the node that runs to the nodes traced from it."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._running: fx.Node | None = None
        self._made_for: dict[fx.Node, fx.Node] = {}

    def made_for(self, node: fx.Node) -> fx.Node | None:
        """The call that was running when a node was traced; None after the last one."""
        return self._made_for.get(node)

    def run_node(self, n: fx.Node) -> Any:
        self._running = n
        result, traced = super().run_node(n), node_meta.value(n)
        if isinstance(result, (torch.SymInt, torch.SymFloat)) and n.target in _DATA_AS_NUMBER:
            # A new symbol, of which nothing is known yet. The old one takes its place, with what the step checked.
            tracer = get_innermost_proxy_mode().tracer  # type: ignore[union-attr]
            set_proxy_slot(traced, tracer, get_proxy_slot(result, tracer))
            return traced
        return result

    def tag(self, node: fx.Node) -> None:
        if self._running is not None:
            node_meta.set_origin(node, node_meta.origin(self._running))
            if self._running.op == "call_function":
                self._made_for[node] = self._running


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _take_writes(module: fx.GraphModule) -> Functional:
    placeholders = {node: index for index, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    writes: dict[int, fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.copy_.default and node.args[0] in placeholders:
            writes[placeholders[node.args[0]]] = node.args[1]
            node.replace_all_uses_with(node.args[1])
            module.graph.erase_node(node)
    results = module.graph.output_node().args[0]
    return Functional(module, list(results), writes)  # type: ignore[arg-type]


_aten = torch.ops.aten
_HIDDEN_WRITES = {
    getattr(_aten, name).default: (3, 4)
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
    if hasattr(_aten, name)
}
"""Operators that update running statistics in training although their schemas do not say so."""


_DATA_AS_NUMBER = frozenset({_aten._local_scalar_dense.default, _aten.item.default})

_NEEDS_GRAD_MODE = frozenset({_aten.mkldnn_rnn_layer.default}) if hasattr(_aten, "mkldnn_rnn_layer") else frozenset()
"""Operators that keep what their backward needs only while gradients are on."""

_REPLACED_BY_FUNCTORCH = frozenset({_aten.binary_cross_entropy_with_logits.default})
"""Operators that torch.func.functionalize computes by a formula of its own, which rounds otherwise than the kernel."""

LIBRARY.define("bernoulli_like(Tensor like, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl("bernoulli_like", lambda like, p: torch.empty_like(like).bernoulli_(p), "CompositeExplicitAutograd")
torch.library.register_fake("wholestep::bernoulli_like", lambda like, p: torch.empty_like(like), lib=LIBRARY)


def keep_random_layout(graph: fx.Graph) -> None:
    """Rewrites ``bernoulli_`` on tensors that are not contiguous, which keeps their layout."""
    for node in graph.find_nodes(op="call_function", target=_aten.bernoulli_.float):
        if not node_meta.tensor(node).is_contiguous() and not node.kwargs:
            with graph.inserting_before(node):
                chance = node.args[1] if len(node.args) > 1 else 0.5
                drawn = graph.call_function(torch.ops.wholestep.bernoulli_like.default, (node.args[0], chance))
                write = graph.call_function(_aten.copy_.default, (node.args[0], drawn))
            node_meta.set_origin(drawn, node_meta.origin(node))
            node_meta.copy_meta(node, write)
            graph_edit.replace_node(node, write)


def _written(node: fx.Node) -> tuple[int, ...]:
    """Positions of the arguments that a call writes to and that torch would not make functional."""
    if not op_info.is_op(node):
        return ()
    hidden = _HIDDEN_WRITES.get(node.target, ())
    if hidden:
        names, given = op_info.argument_names(node.target), op_info.by_name(node.target, node.args, node.kwargs)
        return tuple(i for i in hidden if given["training"] and isinstance(given[names[i]], fx.Node))
    fused = node.target._schema.name.startswith("aten::_fused_")  # type: ignore[union-attr]
    if node.target.namespace in ("aten", "prims", "_c10d_functional") and not fused:  # type: ignore[union-attr]
        return ()
    return op_info.mutated_args(node.target)


def replace_custom_writes(graph: fx.Graph) -> None:
    """Replaces writing operators that torch does not functionalize by functional twins."""
    for node in list(graph.nodes):
        mutated = _written(node)
        if not mutated and node.target not in _NEEDS_GRAD_MODE | _REPLACED_BY_FUNCTORCH:
            continue
        schema = node.target._schema
        count, total = len(schema.returns), len(schema.returns) + len(mutated)
        with graph.inserting_before(node):
            call = graph.call_function(functional_twin(node.target, mutated), node.args, node.kwargs)
            node_meta.copy_meta(node, call)
            values = [call] if total == 1 else [_item(graph, call, i) for i in range(total)]
            for value, position in zip(values[count:], mutated, strict=True):
                _copy_back(graph, op_info.argument(node, position), value)
        if count == 1:
            node.replace_all_uses_with(values[0])
        elif count > 1:
            node.replace_all_uses_with(call)
        graph.erase_node(node)


def _item(graph: fx.Graph, source: fx.Node, index: int) -> fx.Node:
    item = graph.call_function(operator.getitem, (source, index))
    node_meta.set_origin(item, node_meta.origin(source))
    return item


def _copy_back(graph: fx.Graph, targets: Any, values: fx.Node) -> None:
    if isinstance(targets, (list, tuple)):
        for index, target in enumerate(targets):
            _copy_back(graph, target, _item(graph, values, index))
    else:
        write = graph.call_function(_aten.copy_.default, (targets, values))
        node_meta.set_origin(write, node_meta.origin(values))


_COPYABLE = {"Tensor": "Tensor", "Optional[Tensor]": "Tensor", "List[Tensor]": "Tensor[]"}


def functional_twin(op: Any, written: tuple[int, ...]) -> Any:
    """The operator that applies `op` to copies of written arguments, and returns those last.

    Raises CaptureError for signatures that cannot be rewritten (results that alias arguments).
    """
    key = (op, written)
    if key in _known_twins:
        return _known_twins[key]
    schema = op._schema
    kinds = [str(schema.arguments[i].type) for i in written]
    if not _COPYABLE.keys() >= set(kinds) or any(ret.alias_info for ret in schema.returns):
        raise CaptureError(
            f"The operator {op} writes to its arguments in a way that cannot be made functional: {schema}. "
            f"Give it a variant that returns new tensors, or one that writes only to tensors and returns none of them."
        )
    name = "__".join([op.namespace, schema.name.split("::")[1], op._overloadname, *map(str, written)])
    parameters = re.sub(r"Tensor\([^)]*\)", "Tensor", str(schema)).partition("(")[2].rpartition(") -> ")[0]
    returns = ", ".join([*(str(ret.type) for ret in schema.returns), *(_COPYABLE[kind] for kind in kinds)])
    _TWINS.define(f"{name}({parameters}) -> ({returns})")
    _TWINS.impl(name, _runner(op, written, run_op=True), "CompositeExplicitAutograd")
    # A fake kernel needs the operator itself only where it returns something: some fused optimizers have none.
    fake = _runner(op, written, run_op=bool(schema.returns))
    torch.library.register_fake(f"wholestep_functional::{name}", fake, lib=_TWINS)
    twin = _known_twins[key] = getattr(torch.ops.wholestep_functional, name).default
    if written == tuple(range(len(written))) and not schema.returns and set(kinds) == {"List[Tensor]"}:
        op_info.register_in_place(twin, op)
    return twin


def _described(twin: Any) -> tuple[Any, ...]:
    """Of which operator an operator is the twin, and which arguments it copies, as plain data."""
    op, written = next(key for key, known in _known_twins.items() if known is twin)
    return op.namespace, op._schema.name.split("::")[1], op._overloadname, written


def _twin_of(namespace: str, name: str, overload: str, written: tuple[int, ...]) -> Any:
    return functional_twin(getattr(getattr(getattr(torch.ops, namespace), name), overload), written)


serializer.register_namespace("wholestep_functional", _described, _twin_of)


def _runner(op: Any, written: tuple[int, ...], *, run_op: bool) -> Callable[..., Any]:
    """What the twin of `op` does: copies, calls, returns results and copies."""
    names = op_info.argument_names(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = op_info.by_name(op, args, kwargs)
        copies = [_clone(given[names[i]]) for i in written]
        given.update({names[i]: copy for i, copy in zip(written, copies, strict=True)})
        returned: Any = ()
        if op in _NEEDS_GRAD_MODE:
            given = {key: arg.detach() if isinstance(arg, torch.Tensor) else arg for key, arg in given.items()}
            with torch.enable_grad():
                returned = op(**given)
        elif run_op:
            returned = op(**given)
        results = [] if not op._schema.returns else [returned] if len(op._schema.returns) == 1 else list(returned)
        everything = (*results, *copies)
        return everything[0] if len(everything) == 1 else everything

    return run


def _clone(value: Any) -> Any:
    return [one.clone() for one in value] if isinstance(value, (list, tuple)) else value.clone()
