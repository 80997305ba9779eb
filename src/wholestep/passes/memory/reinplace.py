"""Makes calls write in place where that is safe, and writes to inputs real.

Before it the program is functional: an AdamW update reads a parameter and gives a new one. After it::

    _foreach_mul = aten._foreach_mul.Scalar([w, b], s)          aten._foreach_mul_.Scalar([w, b], s)
    getitem = _foreach_mul[0]                            ->     ...
    ... WRITE of w: getitem_16                                  WRITE of w: None (it is already there)

Note: when ``y = f(x, ...)`` may become ``f_(x, ...)``
    x and y have the same shape, strides and type; nothing that overlaps with x is read after f, except
    through y; no other argument of f overlaps with x (being x itself is fine where f is elementwise); x is
    no constant. If x lives in an input, that input has a WRITE output, shares memory with no other input,
    and f stands after the last call that may fail (a collective, a look-up): an error leaves every input as it was.

Note: writes
    A WRITE whose value ends up in the memory of its input is done; all others are copied at the very end.
    What is returned must not change with a later call, so a returned value in written memory is cloned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from wholestep.ir import graph_edit, node_meta, op_info, printer
from wholestep.ir.program import InputKind, OutputKind, Program, Stage
from wholestep.ir.segment import Segment
from wholestep.ir.sizes import hint
from wholestep.passes.analysis import foreach_items, write_order
from wholestep.passes.analysis.alias_analysis import Memory, same_layout, same_place, tensor_nodes
from wholestep.passes.analysis.gather_targets import gather_targets
from wholestep.passes.memory.gather_in_place import gather_in_place
from wholestep.passes.schedule import sink_updates

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Change:
    """One tensor that a call would overwrite."""

    old: fx.Node
    new: torch.Tensor
    """What the functional call gives in its place."""
    group: int
    """Position of the argument that is `old` or holds it."""
    index: int
    """Place of `old` in that argument; 0 where it is no list."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """A tensor among the arguments of a call, and where it stands there."""

    node: fx.Node
    group: int
    index: int
    in_list: bool


def reinplace(program: Program, *, hold_updates: bool = True) -> Program:
    """The scheduled program: calls in place, inputs written, None for writes that are done.

    `hold_updates`: inputs are written after the last collective, so that a peer that dies leaves them as they were.
    Notes say how many calls run in place and how many bytes of inputs are copied at the end.
    """
    if program.stage is Stage.SCHEDULED:
        return program
    graph_edit.remove_dead_code(program.graph)  # once a call writes in place it cannot be dropped
    sunk = sink_updates.sink_updates(program, peers=hold_updates)
    work = _Reinplace(program, hold_updates=hold_updates)
    work.walk()
    copied = work.finish()
    program = replace(program, stage=Stage.SCHEDULED)
    return program.with_notes(
        f"{work.num_done} calls run in place, {work.num_kept} that could by their schema do not",
        f"{printer.bytes_text(copied)} of inputs are copied at the end of the step",
        *([f"{sunk} calls moved after the last one that may fail, because they write to inputs"] if sunk else []),
    )


class _Reinplace:
    def __init__(self, program: Program, *, hold_updates: bool) -> None:
        self.program = program
        self.graph = program.graph
        self.memory = Memory(program.graph)
        fences = write_order.fences(program.graph, peers=hold_updates)
        self.last_fence = max((self.memory.position[node] for node in fences), default=-1)
        written = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
        self.writable = {node for index, node in enumerate(program.placeholders) if index in written}
        self.arguments = write_order.arguments(program)
        self.gathers = gather_targets(program)
        self.overwritten: set[fx.Node] = set()
        """Inputs that a call writes to."""
        self.num_done = 0
        self.num_kept = 0

    def walk(self) -> None:
        """Makes each call in place that can be, in order."""
        for node in list(self.graph.nodes):
            if node._erased:  # an item of a list whose call has become in-place
                continue
            self.memory.enter(node)
            if isinstance(node.target, Segment):
                self._store(node)
                continue
            if node in self.gathers:
                self._gather_into(node, self.gathers[node])
                continue
            twin = op_info.in_place_variant(node.target) if node.op == "call_function" else None
            changes = _changes(node, twin) if twin is not None else []
            if not changes:
                continue
            arguments = self._by_block(node)
            bad = [change for change in changes if not self._may_overwrite(node, change, arguments)]
            # Cloning a few values that must stay pays if it lets the others be overwritten.
            if not bad or (2 * _num_bytes(bad) < _num_bytes(changes) and all(map(_can_clone, bad))):
                self._rewrite(node, twin, changes, bad)
                self.num_done += 1
            else:
                self.num_kept += 1

    def _store(self, node: fx.Node) -> None:
        """Lets a segment write its results to the inputs they are for, where nobody sees it early."""
        arguments, stored, segment = self._by_block(node), [], node.target
        replaced: dict[fx.Node, fx.Node] = {}
        assert isinstance(segment, Segment)
        targets = self._targets()
        for item in list(node.users):
            target = targets.get(item)
            if target is None or target not in node.args:
                continue
            place = node.args.index(target)
            change = _Change(target, node_meta.tensor(item), place, 0)
            alone = len(arguments[id(self.memory.block(target))]) == 1
            if not alone or not self._may_overwrite(node, change, arguments):
                self.num_kept += 1
                continue
            stored.append((place, int(item.args[1])))  # type: ignore[arg-type]
            self.overwritten.add(target)
            self.memory.extend(target, self.memory.last_read[item])
            replaced[item] = target
        graph_edit.replace_nodes(replaced)
        if stored:
            node.target, gone = replace(segment, stored=tuple(stored)), {result for _, result in stored}
            # No memory is made for them.
            results = enumerate(node_meta.value(node))
            node_meta.set_value(node, [None if number in gone else one for number, one in results])
            self.num_done += 1

    def _gather_into(self, node: fx.Node, targets: Sequence[fx.Node | None]) -> None:
        """Lets a gather write to the inputs that its results are for."""
        written = gather_in_place(self.program, self.memory, node, targets, self._inputs_allow)
        self.overwritten |= written
        self.num_done, self.num_kept = self.num_done + bool(written), self.num_kept + (not written)

    def _targets(self) -> dict[fx.Node, fx.Node]:
        """The input that a value is written to, where it is written to one and no more."""
        targets_of: dict[fx.Node, list[fx.Node]] = {}
        inputs = self.program.placeholders
        for output, value in zip(self.program.outputs, self.program.results, strict=True):
            if output.kind is OutputKind.WRITE and output.target is not None and isinstance(value, fx.Node):
                targets_of.setdefault(value, []).append(inputs[output.target])
        return {value: targets[0] for value, targets in targets_of.items() if len(targets) == 1}

    def _may_overwrite(self, node: fx.Node, change: _Change, arguments: dict[int, list[_Argument]]) -> bool:
        value, position = node_meta.tensor(change.old), self.memory.position[node]
        if not same_layout(value, change.new):
            return False
        if op_info.is_collective(node) and not value.is_contiguous():
            return False  # the functional collective copies into order first, the in-place one refuses
        block = self.memory.block(change.old)
        if block.constant or not self._inputs_allow(block.inputs, node):
            return False
        if self.memory.read_later(change.old, position) is not None:
            return False
        return self._arguments_allow(node, change, arguments[id(block)])

    def _inputs_allow(self, inputs: Sequence[fx.Node], node: fx.Node) -> bool:
        if not inputs:
            return True
        late = self.memory.position[node] > self.last_fence or write_order.frees(node, self.arguments)
        return len(inputs) == 1 and inputs[0] in self.writable and late

    def _arguments_allow(self, node: fx.Node, change: _Change, sharing: Sequence[_Argument]) -> bool:
        """Whether no other argument overlaps, but as itself in an elementwise call."""
        value = node_meta.tensor(change.old)
        for argument in sharing:
            if (argument.group, argument.index) == (change.group, change.index):
                continue
            # In a foreach call only the elements with the same index meet.
            meets = argument.index == change.index and argument.in_list == _gives_lists(node)
            other = node_meta.tensor(argument.node)
            itself = meets and _is_elementwise(node.target) and same_place(other, value)
            if self.memory.overlap(other, value) and not itself:
                return False
        return True

    def _by_block(self, node: fx.Node) -> dict[int, list[_Argument]]:
        """The tensors that a call is given, by the block of memory they live in."""
        by_block: dict[int, list[_Argument]] = {}
        for group, arg in enumerate((*node.args, *node.kwargs.values())):
            in_list = isinstance(arg, (list, tuple))
            for index, element in enumerate(arg if isinstance(arg, (list, tuple)) else [arg]):
                for one in tensor_nodes(element):
                    argument = _Argument(one, group, index, in_list)
                    by_block.setdefault(id(self.memory.block(one)), []).append(argument)
        return by_block

    def _rewrite(self, node: fx.Node, twin: Any, changes: Sequence[_Change], bad: Sequence[_Change]) -> None:
        memory, args = self.memory, list(node.args)
        into = {(change.group, change.index): change.old for change in changes}
        with self.graph.inserting_before(node):
            for change in bad:
                clone = graph_edit.emit(self.graph, _aten.clone.default, change.old, like=node)
                memory.insert(clone, at=node)
                into[change.group, change.index] = clone
            for group in {change.group for change in changes}:
                if _gives_lists(node):
                    args[group] = [into[group, index] for index in range(len(args[group]))]  # type: ignore[arg-type]
                else:
                    args[group] = into[group, 0]
            new = self.graph.call_function(twin, tuple(args), node.kwargs)
        node_meta.copy_meta(node, new)
        node_meta.set_stands_for(new, node.name)
        for old in into.values():
            self.overwritten.update(memory.block(old).inputs)
        if op_info.is_collective(node) and _gives_lists(node):  # its results are waited for, one by one
            memory.insert(new, at=node, onto=[into[0, index] for index in range(len(into))])
            graph_edit.replace_node(node, new)
        elif _gives_lists(node):
            node_meta.set_value(new, None)
            memory.insert(new, at=node)
            self._read_elements(node, into)
        else:
            memory.insert(new, at=node, onto=into[0, 0])
            graph_edit.replace_node(node, new)

    def _read_elements(self, node: fx.Node, into: dict[tuple[int, int], fx.Node]) -> None:
        """Lets readers of the node's lists read the tensors written to; erases the node."""
        items_at: dict[tuple[int, int], list[fx.Node]] = {}
        for group, index, item in foreach_items.items(node):
            items_at.setdefault((group, index), []).append(item)
        replaced: dict[fx.Node, fx.Node] = {}
        for (group, index), readers in items_at.items():
            # What is not in `into` is an argument that the call leaves alone, whatever its schema says.
            element: fx.Node = into.get((group, index)) or node.args[group][index]  # type: ignore[index,assignment]
            for reader in readers:
                self.memory.extend(element, self.memory.last_read[reader])
                replaced[reader] = element
        graph_edit.replace_nodes(replaced)
        for item in list(node.users):
            self.graph.erase_node(item)
        self.graph.erase_node(node)

    def finish(self) -> int:
        """Copies what is not yet where it belongs. Gives the number of bytes copied."""
        placeholders, results = self.program.placeholders, list(self.program.results)
        pending: dict[fx.Node, fx.Node] = {}
        freed: dict[fx.Node, fx.Node] = {}
        for index, output in enumerate(self.program.outputs):
            value = results[index]
            if output.kind is OutputKind.WRITE and output.target is not None and isinstance(value, fx.Node):
                target = placeholders[output.target]
                if not same_place(node_meta.tensor(value), node_meta.tensor(target)):
                    (freed if op_info.frees_storage(value) else pending)[target] = value
                results[index] = None
        with self.graph.inserting_before(self.graph.output_node()):
            self._protect_returned(results, self.overwritten | pending.keys() | freed.keys())
            for target in self._without_memory().intersection(pending):
                graph_edit.emit(
                    self.graph, op_info.RESIZE_STORAGE_, target, node_meta.num_bytes(target), like=pending[target]
                )
            self._copy(pending)
            for target, value in freed.items():
                graph_edit.emit(self.graph, op_info.RESIZE_STORAGE_, target, 0, like=value)
        for node in self.graph.find_nodes(op="call_function", target=op_info.SET_VERSION):
            self.graph.output_node().prepend(node)  # after the writes, which count
        graph_edit.set_results(self.graph, results)
        return sum(node_meta.num_bytes(target) for target in pending)

    def _without_memory(self) -> set[fx.Node]:
        """Inputs whose storage has 0 bytes after the last call."""
        pairs = zip(self.program.placeholders, self.program.inputs, strict=True)
        found = {node for node, record in pairs if record.freed}
        for call in self.graph.find_nodes(op="call_function", target=op_info.RESIZE_STORAGE_):
            found.difference_update(self.memory.block(call).inputs)
            if op_info.frees_storage(call):
                found.update(self.memory.block(call).inputs)
        return found

    def _protect_returned(self, results: list[Any], written: set[fx.Node]) -> None:
        """Clones what is returned and lives in an input that is written, now or at the next call."""
        kinds = dict(zip(self.program.placeholders, self.program.inputs, strict=True))
        clones: dict[fx.Node, fx.Node] = {}
        for index, output in enumerate(self.program.outputs):
            value = results[index]
            if not isinstance(value, fx.Node) or not isinstance(node_meta.value(value), torch.Tensor):
                continue
            shared = written.intersection(self.memory.block(value).inputs)
            # The new .grad in the memory of the old one is what eager code leaves.
            if output.kind is OutputKind.GRAD and value not in self.writable:
                shared = {node for node in shared if kinds[node].kind is not InputKind.GRAD}
            if shared and value not in clones:
                clones[value] = graph_edit.emit(self.graph, _aten.clone.default, value, like=value)
            results[index] = clones[value] if shared else value

    def _copy(self, pending: dict[fx.Node, fx.Node]) -> None:
        """``copy_`` into inputs, one call for those of one type."""
        # A value that a copy would change is cloned first.
        sources = dict(pending)
        for target, value in pending.items():
            if not pending.keys().isdisjoint(self.memory.block(value).inputs):
                sources[target] = graph_edit.emit(self.graph, _aten.clone.default, value, like=value)
        groups: dict[tuple[torch.device, torch.dtype], list[fx.Node]] = {}
        for target in pending:
            tensor = node_meta.tensor(target)
            groups.setdefault((tensor.device, tensor.dtype), []).append(target)
        for targets in groups.values():
            values = [sources[target] for target in targets]
            if len(targets) == 1:
                graph_edit.emit(self.graph, _aten.copy_.default, targets[0], values[0], like=values[0])
            else:
                graph_edit.emit(self.graph, _aten._foreach_copy_.default, targets, values, like=values[0])


def _changes(node: fx.Node, twin: Any) -> list[_Change]:
    """What the in-place variant of the call would overwrite; empty for unknown uses."""
    value = node_meta.value(node)
    if isinstance(value, torch.Tensor):
        old = node.args[0]
        return [_Change(old, value, 0, 0)] if isinstance(old, fx.Node) else []
    if not _gives_lists(node) or not foreach_items.only_items(node):
        return []
    lists = value if foreach_items.several(node) else [value]
    return [
        _Change(old, new, group, index)
        for group in op_info.written_by(twin, node.kwargs)
        for index, (old, new) in enumerate(zip(node.args[group], lists[group], strict=True))  # type: ignore[arg-type]
    ]


def _gives_lists(node: fx.Node) -> bool:
    """Whether the call gives a list of tensors, or several."""
    value = node_meta.value(node)
    if not isinstance(value, (list, tuple)):
        return False
    returns = node.target._schema.returns  # type: ignore[union-attr]
    return all("List[Tensor]" in str(one.type) for one in returns)


def _is_elementwise(op: Any) -> bool:
    name = op._schema.name
    return torch.Tag.pointwise in op.tags or name.startswith("aten::_foreach_")


def _can_clone(change: _Change) -> bool:
    return same_layout(node_meta.tensor(change.old), change.new)


def _num_bytes(changes: Sequence[_Change]) -> int:
    return sum(hint(change.new.numel()) * change.new.element_size() for change in changes)
