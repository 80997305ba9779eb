"""A graph as numbers: costs of nodes, dependencies, and memory that they make and read.

Note: what must stand before what
    Arguments before what reads them. Random operators among each other, as they share a generator; an effect, and
    whatever handles storages and version counters, stays where it is. Collectives start in the order given: it is the
    same on every rank, also where batches differ and with them the times. A node that could write to an input in place
    stands after what reads that input now, so that it still can. Where a compiler makes one kernel of an update, its
    first calls (AdamW's decay) stand after the waits of its last: done earlier, to fill the time, they would be a
    kernel of their own, and their values would be written to memory and read again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.cost.fusion_model import is_of_host
from wholestep.cost.liveness import Ledger, Make, Usage
from wholestep.cost.simulator import Sharing, Task
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.program import OutputKind, Program, Stage
from wholestep.ir.sizes import hint
from wholestep.passes.analysis import write_order
from wholestep.passes.analysis.alias_analysis import Memory, same_layout
from wholestep.passes.analysis.gather_targets import gather_targets

_STAYS = (op_info.RESIZE_STORAGE, op_info.RESIZE_STORAGE_, op_info.VERSION, op_info.SET_VERSION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """The calls of a graph in its order, as tasks of the same number, with the memory they use."""

    nodes: tuple[fx.Node, ...]
    tasks: tuple[Task, ...]
    usages: tuple[Usage, ...]
    late: tuple[bool, ...]
    """Nodes outside of forward and backward: updates, counters, clipping, averages."""
    joins: tuple[bool, ...]
    """Late nodes of which a compiler makes kernels."""
    gathers: tuple[int, ...]
    """Those that bring what forward or backward read, in order."""
    pinned: frozenset[int]
    writable: frozenset[int]
    homes: tuple[tuple[int, ...], ...]
    """For each node, the buffers that its values live in."""


def tasks_of(program: Program, cost: CostModel, *, hold_updates: bool = False) -> Tasks:
    """The calls of a program as numbers.

    `hold_updates`: inputs are written after all collectives.
    """
    nodes = tuple(node for node in program.graph.nodes if node.op not in ("placeholder", "output"))
    number_of = {node: number for number, node in enumerate(nodes)}
    ranks = {axis.group: axis.size for axis in program.mesh}
    deps = [{number_of[arg] for arg in node.all_input_nodes if arg in number_of} for node in nodes]
    orders = [_kept_orders(nodes), _hazards(program, number_of, hold_updates=hold_updates)]
    if cost.compiles is not None:
        orders.append(_fused_updates_wait(program, number_of, cost.compiles))
    for before, after in itertools.chain(*orders):
        if before < after:
            deps[after].add(before)
    times_us = cost.times_us(nodes)
    tasks = tuple(
        Task(
            us=_us(node, cost, times_us[node]),
            deps=tuple(sorted(deps[number])),
            comm_us=comm_us(node, cost, ranks) if op_info.is_collective(node) else None,
            link=str(node.args[-1]) if op_info.is_collective(node) else "",
            waits_for=_waits_for(node, number_of),
        )
        for number, node in enumerate(nodes)
    )
    usages, homes, pinned, writable = _memory(program, nodes)
    late, compiles = tuple(map(_is_late, nodes)), cost.compiles
    return Tasks(
        nodes=nodes, tasks=tasks, usages=usages, late=late,
        joins=tuple(
            ok and compiles is not None and (compiles(node) or is_of_host(node))
            for ok, node in zip(late, nodes, strict=True)
        ),
        gathers=tuple(number for number, node in enumerate(nodes) if node_meta.is_prefetchable(node)),
        pinned=pinned, writable=writable, homes=homes,
    )  # fmt: skip


def live_bytes(program: Program) -> dict[fx.Node, int]:
    """How many bytes are alive while each call runs, those of inputs not counted."""
    nodes = tuple(node for node in program.graph.nodes if node.op not in ("placeholder", "output"))
    usages, _, pinned, writable = _memory(program, nodes)
    ledger, live = Ledger(usages, pinned=pinned, writable=writable), {}
    for number, node in enumerate(nodes):
        live[node] = ledger.live_bytes + ledger.needed_bytes(number)
        ledger.run(number)
    return live


def _is_late(node: fx.Node) -> bool:
    return node_meta.origin(node).region in (node_meta.Region.OPTIMIZER, node_meta.Region.OTHER)


def sharing(cost: CostModel) -> Sharing:
    """How much longer computation and collectives take beside each other."""
    return Sharing(compute=cost.compute_slowdown, collective=cost.collective_slowdown)


def comm_us(node: fx.Node, cost: CostModel, ranks: dict[str, int]) -> float:
    """Predicted time of a collective, microseconds. Its message is the larger of what goes in and what comes out, and
    of a bucket that share of it which travels."""
    given, record = sum(map(node_meta.num_bytes, graph_edit.nodes_of(node.args[0]))), node_meta.bucket(node)
    message_bytes = int(max(given, node_meta.num_bytes(node)) * (1.0 if record is None else record.share))
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    kinds = ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "gather")
    kind = next((kind for kind in kinds if kind in name), "all_reduce")
    kind = {"scatter": "broadcast", "gather": "all_gather"}.get(kind, kind)
    return cost.collective_us(kind, message_bytes, ranks.get(str(node.args[-1]), 2))


def _us(node: fx.Node, cost: CostModel, us: float) -> float:
    """Time on the device, microseconds."""
    # Where the host is the device, it also pays for starting a collective.
    return cost.launch_us if cost.device.host_is_device and op_info.is_collective(node) else us


def _waits_for(node: fx.Node, number_of: dict[fx.Node, int]) -> tuple[int, ...]:
    if node.target is not op_info.WAIT:
        return ()
    start = op_info.waited_for(node)
    return (number_of[start],) if op_info.is_collective(start) else ()


def _kept_orders(nodes: Sequence[fx.Node]) -> Iterator[tuple[int, int]]:
    """Pairs that keep their order besides those of data."""
    last_random = last_start = last_fixed = None
    for number, node in enumerate(nodes):
        if last_fixed is not None:
            yield last_fixed, number
        if node.target in _STAYS or (op_info.has_effect(node.target) and not op_info.is_random(node.target)):
            yield from ((other, number) for other in range(last_fixed or 0, number))
            last_fixed = number
        if op_info.is_random(node.target):
            if last_random is not None:
                yield last_random, number
            last_random = number
        if op_info.is_collective(node):
            if last_start is not None:
                yield last_start, number
            last_start = number


def _hazards(program: Program, number_of: dict[fx.Node, int], *, hold_updates: bool) -> Iterator[tuple[int, int]]:
    """Orders that writes in place need: readers of an input, and fences, before its update."""
    fences = [number_of[node] for node in write_order.fences(program.graph, peers=hold_updates)]
    readers = write_order.readers(program)
    for node, bases in write_order.updates(program).items():
        for base in bases:
            yield from ((number_of[reader], number_of[node]) for reader in readers[base] if reader is not node)
        yield from ((fence, number_of[node]) for fence in fences)


def fused_update_ends(program: Program, compiles: Callable[[fx.Node], bool]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Pairs of the first and the last call of each update that a compiler fuses."""
    ends = {
        program.placeholders[end.target]: value.args[0] if value.target is operator.getitem else value
        for end, value in zip(program.outputs, program.results, strict=True)
        if end.kind is OutputKind.WRITE and end.target is not None and isinstance(value, fx.Node)
    }
    for node, bases in write_order.updates(program).items():
        if not _is_late(node) or not compiles(node):
            continue  # a product that adds a bias could write to the bias
        for last in dict.fromkeys(ends[base] for base in bases if base in ends):
            if isinstance(last, fx.Node) and last is not node and compiles(last) and _leads_to(node, last):
                yield node, last


def _leads_to(node: fx.Node, last: fx.Node) -> bool:
    """Whether `last` depends on `node` by late nodes alone."""
    seen, stack = {node}, [node]
    while stack:
        for user in stack.pop().users:
            if user is last:
                return True
            if user not in seen and _is_late(user):
                seen.add(user)
                stack.append(user)
    return False


def _fused_updates_wait(
    program: Program, number_of: dict[fx.Node, int], compiles: Callable[[fx.Node], bool]
) -> Iterator[tuple[int, int]]:
    """The waits of what an input becomes, before the calls that begin to compute it."""
    awaits: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in number_of:
        own = frozenset([node] if node.target is op_info.WAIT else [])
        awaits[node] = own.union(*(awaits[arg] for arg in node.all_input_nodes if arg in awaits))
    for first, last in fused_update_ends(program, compiles):
        yield from ((number_of[wait], number_of[first]) for wait in awaits[last] - awaits[first])


def _memory(
    program: Program, nodes: Sequence[fx.Node]
) -> tuple[tuple[Usage, ...], tuple[tuple[int, ...], ...], frozenset[int], frozenset[int]]:
    """Buffers that nodes read and make; those their values live in; those that stay, and that the step writes to."""
    memory = Memory(program.graph)
    for node in program.graph.nodes:
        memory.enter(node)
    named: dict[int, int] = {}

    def buffers(node: fx.Node) -> list[int]:
        return [named.setdefault(storage, len(named)) for storage in memory.storages(node)]

    inputs = program.placeholders
    kept = [buffer for node in inputs for buffer in buffers(node)]
    targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
    writable = [buffer for index, node in enumerate(inputs) if index in targets for buffer in buffers(node)]
    results = [
        buffer
        for output, value in zip(program.outputs, program.results, strict=True)
        if isinstance(value, fx.Node) and (output.kind is not OutputKind.WRITE)
        for buffer in buffers(value)
    ]
    gathers = gather_targets(program) if program.stage is not Stage.SCHEDULED else {}
    made: set[int] = set(kept)
    usages, homes = [], []
    for node in nodes:
        # Taking one item out of a list does not keep the others alive.
        given = [node] if node.target is operator.getitem else node.all_input_nodes
        read = dict.fromkeys(buffer for arg in given for buffer in buffers(arg))
        homes.append(tuple(buffers(node)))
        # What could be made in place is so at SCHEDULED; the rest could not.
        onto = dict(_onto(node, memory, named)) if program.stage is not Stage.SCHEDULED else {}
        for buffer, target in zip(homes[-1], gathers.get(node, ()), strict=False):
            if target is not None:
                onto[buffer] = buffers(target)[0]
                read.setdefault(onto[buffer])
        makes = []
        for tensor, buffer in zip(node_meta.tensors(node), homes[-1], strict=True):
            if buffer not in made:
                made.add(buffer)
                num_bytes = hint(tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else 0
                makes.append(Make(buffer=buffer, num_bytes=num_bytes, onto=onto.get(buffer)))
            read.setdefault(buffer)
        usages.append(Usage(reads=tuple(read), makes=tuple(makes)))
    return tuple(usages), tuple(homes), frozenset([*kept, *results]), frozenset(writable)


def _onto(node: fx.Node, memory: Memory, named: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Pairs of a buffer that the node makes and the one that an in-place variant would reuse."""
    twin = op_info.in_place_variant(node.target) if node.op == "call_function" else None
    if twin is None:
        return
    for position in op_info.written_by(twin, node.kwargs):
        olds = list(graph_edit.nodes_of(node.args[position]))
        news = list(node_meta.tensors_in(_nth(node_meta.value(node), position, node)))
        for old, new in zip(olds, news, strict=False):
            if same_layout(node_meta.tensor(old), new):
                yield named[memory.storage(new)], named[memory.storage(node_meta.tensor(old))]


def _nth(value: object, position: int, node: fx.Node) -> object:
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return value[position] if len(returns) > 1 else value  # type: ignore[index]
