"""Makes segments of the nodes between collectives, which a compiler gets as a whole.

What a compiler must not move stays a node of its own, in its place: collectives and waits, random numbers, arithmetic
of the host, operators the compiler has no kernel for. So the order of the plan holds whatever the compiler does inside
of a segment::

    mm = aten.mm(x, w)                 segment_0 = run_segment_0([x, w, ...])
    gelu = aten.gelu(mm)               flat = segment_0[0]
    ...                         ->     all_reduce = all_reduce(flat)
    flat = aten.cat([...])             segment_1 = run_segment_1([...])
    all_reduce = all_reduce(flat)      ...

Note: views
    A view costs nothing and belongs to who reads it: a segment takes the tensor that is viewed and views it inside, and
    gives no views back. So no two arguments or results are the same memory seen twice.

Note: what may fail
    Inputs are written after the last call that may refuse its values. Where a segment holds such a call, an update of
    an input ends it and stands in the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.lazy_graph_module import module_of
from wholestep.ir.node_meta import Region
from wholestep.ir.ops.packed_scalars import element
from wholestep.ir.program import Program, Stage
from wholestep.ir.segment import Segment
from wholestep.ir.size_nodes import SymbolNodes, read_of_inputs
from wholestep.ir.sizes import are_same
from wholestep.passes.analysis import repeated_layers, write_order
from wholestep.passes.schedule import segment_recompute
from wholestep.passes.schedule.pack_scalars import known_at_start

NodePredicate = Callable[[fx.Node], bool]
"""What a compiler says of a node."""

MIN_CALLS = 2
"""Nodes that compute, below which a compiler mostly has nothing to gain."""


def _never(node: fx.Node) -> bool:
    return False


def _none(graph: fx.Graph) -> Collection[fx.Node]:
    return ()


def form_segments(
    program: Program,
    *,
    compiles: NodePredicate,
    separate_nodes: Callable[[fx.Graph], Collection[fx.Node]] = _none,
    may_postpone: NodePredicate = _never,
    pays_single: NodePredicate = _never,
    by_library: NodePredicate = _never,
    cuts_repeats: bool = False,
    is_pointwise: NodePredicate | None = None,
) -> Program:
    """The program with runs of nodes as segments, in the same order.

    Args:
        program: one that is not scheduled yet; another comes back as it is.
        compiles: whether the compiler may have a node.
        separate_nodes: the nodes of a graph that go into segments with their like alone, for a compiler of their own.
        may_postpone: whether a node that it may not have may follow the segment that it would otherwise cut in two.
        pays_single: whether a node is a segment if there is no other one to join.
        by_library: whether the compiler leaves a node that it may have to a library.
        cuts_repeats: whether runs are cut before such nodes where they repeat themselves
            (`wholestep.passes.analysis.repeated_layers`).
        is_pointwise: whether a kernel that reads what a node gives can compute that on its way. Backward segments do so
            where that saves reads and writes (`wholestep.passes.schedule.segment_recompute`); None: they read what the
            forward gave.

    Notes say how many nodes are in segments, how many of those are different, which operators are not, and how many
    bytes less are written and read since something is computed again.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph = program.graph
    read_of_inputs(graph)  # what reads them of a run would cut it
    graph_edit.remove_dead_code(graph)
    updates = {node for node, inputs in write_order.updates(program).items() if _fits(node, inputs[0])}
    separate = separate_nodes(graph)
    runs = [run for run in _runs(program, updates, compiles, separate, may_postpone) if _is_worth_it(run, pays_single)]
    if cuts_repeats:
        runs = repeated_layers.split_at_repeats(runs, by_library=by_library, updates=updates, uncut=separate)
    saved_bytes = 0
    if is_pointwise is not None:
        runs, saved_bytes = segment_recompute.recompute_in_segments(
            graph, runs, is_pointwise=is_pointwise, by_library=by_library,
            fixed=lambda node: node in separate or node_meta.origin(node).region is Region.OPTIMIZER,
        )  # fmt: skip
    symbol_nodes = SymbolNodes(graph)
    segments = [_enclose(graph, run, number, symbol_nodes) for number, run in enumerate(runs)]
    graph_edit.sort_topologically(graph)
    _hoist_getitems(graph)
    graph_edit.remove_dead_code(graph)
    inside, different = sum(len(run) for run in runs), len({segment.likeness for segment in segments})
    alike = f" ({different} different)" if different < len(runs) else ""
    again = f"; {saved_bytes:,} bytes less to write and read, computed again" if saved_bytes else ""
    return program.with_notes(f"{inside} calls in {len(runs)} segments{alike}, {_outside_note(graph)}{again}")


def _is_worth_it(run: list[fx.Node], pays_single: NodePredicate) -> bool:
    return len(run) >= MIN_CALLS or any(_reads_packed(node) or pays_single(node) for node in run)


def _outside_note(graph: fx.Graph) -> str:
    """How many calls run on their own, and of which operators."""
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if op_info.is_op(node) and not op_info.is_view(node):
            name = node.target._schema.name.split("::")[1]
            counts[name] = counts.get(name, 0) + 1
    listed = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    return f"{sum(counts.values())} on their own ({listed})" if counts else "none on its own"


@dataclass(slots=True)
class _Run:
    """The run that is being filled."""

    calls: list[fx.Node] = field(default_factory=list)
    dependents: set[fx.Node] = field(default_factory=set)
    """Its calls, and views of what they give."""
    may_fail: bool = False
    postponed: set[fx.Node] = field(default_factory=set)
    """Calls outside of it that follow it, and what depends on them."""
    separate: bool = False
    """Whether its calls are for a compiler of their own."""
    updating: bool = False
    """Whether it belongs to an optimizer, or reads what has arrived: such segments wait for communication."""


def _runs(
    program: Program,
    updates: Collection[fx.Node],
    compiles: NodePredicate,
    separate: Collection[fx.Node],
    may_postpone: NodePredicate,
) -> list[list[fx.Node]]:
    """Nodes to be compiled together."""
    # Between the first and the last of a run nothing depends on it but itself.
    _hoist_getitems(program.graph)
    on_host = known_at_start(program.graph)
    done: list[list[fx.Node]] = []
    run = _Run()
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        depends = any(arg in run.dependents for arg in node.all_input_nodes)
        follows = any(arg in run.postponed for arg in node.all_input_nodes)
        if op_info.is_view(node) and (depends or follows):
            (run.postponed if follows else run.dependents).add(node)
        elif op_info.is_view(node):
            continue
        elif node.target is operator.getitem and node.args[0] in run.dependents:
            run.calls.append(node)  # with the call that gives it, wherever that belongs
            run.dependents.add(node)
        elif compiles(node) and node not in on_host:
            updating = (
                node_meta.origin(node).region is Region.OPTIMIZER
                or any(map(_has_arrived, node.all_input_nodes))
                or (depends and run.updating)
            )
            kind = (
                (True, True) if node in separate else (updating, False)
            )  # lists are mostly of what an optimizer updates
            other = run.calls and kind != (run.updating, run.separate)
            if follows or (run.may_fail and node in updates) or other:
                done.append(run.calls)
                run = _Run()
            run.updating, run.separate = kind
            run.calls.append(node)
            run.dependents.add(node)
            run.may_fail |= op_info.may_fail(node.target)
        elif (depends and may_postpone(node)) or (follows and not _keeps_its_place(node)):
            run.postponed.add(node)
        elif depends or _keeps_its_place(node):
            done.append(run.calls)
            run = _Run()
    return [*done, run.calls]


def _reads_packed(node: fx.Node) -> bool:
    """Whether the node reads a packed number."""
    # The host would wait for the number if the node were no part of a segment.
    return any(arg.target is element for arg in node.all_input_nodes)


def _has_arrived(node: fx.Node) -> bool:
    """Whether the node is what a wait gives, or a view of it."""
    return node.target is op_info.WAIT or (op_info.is_view(node) and any(map(_has_arrived, node.all_input_nodes)))


def _fits(call: fx.Node, target: fx.Node) -> bool:
    """Whether what a call gives has the shape of the input; of a list that is taken for granted."""
    value = node_meta.value(call)
    return not isinstance(value, torch.Tensor) or are_same(value.shape, node_meta.tensor(target).shape)


def _hoist_getitems(graph: fx.Graph) -> None:
    """Moves items right after the call that gives them, with which they go into a segment."""
    for node in list(graph.nodes):
        if (
            node.op == "call_function"
            and not op_info.is_view(node)
            and not isinstance(node_meta.value(node), torch.Tensor)
        ):
            for item in reversed([user for user in node.users if user.target is operator.getitem]):
                node.append(item)


def _keeps_its_place(node: fx.Node) -> bool:
    """Whether a call outside of segments must not move against them."""
    target = node.target
    if isinstance(target, Segment):
        return True  # else a second run of the pass would join what the first one kept apart
    return (
        op_info.needs_peers(target)
        or op_info.has_effect(target)
        or op_info.is_random(target)
        or op_info.may_fail(target)
    )


def _enclose(graph: fx.Graph, run: list[fx.Node], number: int, symbol_nodes: SymbolNodes) -> Segment:
    """Puts one call in the place of the last of `run`, with the others inside.

    Its last arguments are the symbols of sizes of the others: a compiler cannot tell `b` from a size `b * t`.
    """
    members, copied = set(run), dict.fromkeys(_with_views(run))
    arguments = list(dict.fromkeys(arg for node in copied for arg in node.all_input_nodes if arg not in copied))
    arguments += symbol_nodes([node_meta.value(arg) for arg in arguments])
    inner, root = fx.Graph(), graph.owning_module
    assert root is not None  # every program has one
    inside: dict[fx.Node, fx.Node] = {}
    for arg in arguments:
        inside[arg] = inner.placeholder(arg.name)
        node_meta.copy_meta(arg, inside[arg])
    for node in copied:
        inside[node] = inner.node_copy(node, inside.__getitem__)
    results = [
        node for node in run if isinstance(node_meta.value(node), torch.Tensor) and _is_read_outside(node, members)
    ]
    inner.output(tuple(inside[node] for node in results))
    module = module_of(root, inner)
    segment = Segment(name=f"run_segment_{number}", read=lambda: module)
    _replace(graph, run, results, segment, arguments)
    return segment


def _with_views(run: list[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of `run`, before each of them the views that it reads."""
    for node in run:
        for arg in node.all_input_nodes:
            if op_info.is_view(arg):
                yield from _with_views([arg])
        yield node


def _is_read_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    readers = list(node.users)
    while readers:
        reader = readers.pop()
        if op_info.is_view(reader):
            readers += reader.users
        elif reader not in members:
            return True
    return False


def _replace(
    graph: fx.Graph, run: list[fx.Node], results: list[fx.Node], segment: Segment, arguments: Iterable[fx.Node]
) -> None:
    """The call of `segment` after `run`, whose members go."""
    with graph.inserting_after(run[-1]):
        call = graph.call_function(segment, tuple(arguments))
    call.name = segment.name.removeprefix("run_")
    node_meta.set_value(call, [node_meta.value(node) for node in results])
    origins = list(map(node_meta.origin, run))
    # Of what a backward computes again it says where that stood in the forward.
    node_meta.set_origin(call, next((one for one in origins if one.region is not Region.RECOMPUTE), origins[0]))
    last, replaced = call, {}
    for place, node in enumerate(results):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (call, place))
        node_meta.copy_meta(node, last)
        replaced[node] = last
    graph_edit.replace_nodes(replaced)
    for node in reversed([node for node in run if node not in replaced]):
        _drop_views(node)
        graph.erase_node(node)


def _drop_views(node: fx.Node) -> None:
    """Erases views of `node` that nobody reads any more, as all readers were members."""
    for user in list(node.users):
        if op_info.is_view(user):
            _drop_views(user)
            if not user.users:
                user.graph.erase_node(user)
