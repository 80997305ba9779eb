"""verify(program): a table of rules per stage. The first node that breaks one is named with the rule."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
import torch.fx as fx

from wholestep.errors import InternalError
from wholestep.ir import node_meta, op_info
from wholestep.ir.program import OutputKind, Program, Stage
from wholestep.ir.sizes import fits

Rule = Callable[[Program], Iterator[str]]
"""Yields a sentence per violation, with the node's name in it."""


def _records_match_the_graph(program: Program) -> Iterator[str]:
    placeholders = program.placeholders
    if len(placeholders) != len(program.inputs):
        yield f"{len(placeholders)} placeholders for {len(program.inputs)} inputs"
        return
    if len(program.results) != len(program.outputs):
        yield f"{len(program.results)} results for {len(program.outputs)} outputs"
    for node, record in zip(placeholders, program.inputs, strict=True):
        found = node_meta.value(node)
        if isinstance(found, torch.Tensor) and not (fits(found.shape, record.shape) and found.dtype == record.dtype):
            said = f"{record.dtype}{list(record.shape)}"
            yield f"{node.name} is {found.dtype}{list(found.shape)}, its record {record.name} says {said}"


def _targets_exist(program: Program) -> Iterator[str]:
    seen: set[tuple[OutputKind, int]] = set()
    for output in program.outputs:
        if output.kind in (OutputKind.WRITE, OutputKind.GRAD):
            if output.target is None or not 0 <= output.target < len(program.inputs):
                yield f"output {output.name} targets input {output.target}, which does not exist"
            elif (output.kind, output.target) in seen:
                yield f"output {output.name} is the second {output.kind.value} of input {output.target}"
            else:
                seen.add((output.kind, output.target))


def _writes_keep_shape_and_dtype(program: Program) -> Iterator[str]:
    for output, result in zip(program.outputs, program.results, strict=True):
        if output.kind is OutputKind.WRITE and output.target is not None and isinstance(result, fx.Node):
            record, new = program.inputs[output.target], node_meta.value(result)
            if isinstance(new, torch.Tensor) and not (fits(new.shape, record.shape) and new.dtype == record.dtype):
                said = f"{record.dtype}{list(record.shape)}"
                yield f"{result.name} writes {new.dtype}{list(new.shape)} to {record.name}, a {said}"


def _every_node_has_a_value(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.op == "call_function" and node_meta.value(node) is None and not _gives_nothing(node):
            yield f"{node.name} ({node.target}) has no recorded value"


def _gives_nothing(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns


def _known_node_kinds(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "call_function", "get_attr", "output"):
            yield f"{node.name} is a {node.op}"


def _no_raw_collectives(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if op_info.is_op(node) and node.target.namespace == "c10d":
            yield f"{node.name} is {node.target}, whose wait is not in the graph"


def _functional(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.op == "call_function" and op_info.mutated_args(node.target):
            yield f"{node.name} ({node.target}) writes in place"


def _no_markers(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if node.target is op_info.GRADIENT:
            yield f"{node.name} is a gradient marker"


def _collectives_are_waited_for(program: Program) -> Iterator[str]:
    for node in program.graph.nodes:
        if not op_info.is_collective(node):
            continue
        several = isinstance(node_meta.value(node), (list, tuple))
        items = [user for user in node.users if user.target is operator.getitem] if several else [node]
        # What the step returns may be under way: the caller waits.
        ends = [[user for user in item.users if user.target is op_info.WAIT or user.op == "output"] for item in items]
        if not all(ends) or not ends:
            yield f"{node.name} ({node.target}) is never waited for"
        if any(len(found) != len(item.users) for found, item in zip(ends, items, strict=True)) or (
            several and len(items) != len(node.users)
        ):
            yield f"{node.name} ({node.target}) is read before it is waited for"


def _collectives_use_the_mesh(program: Program) -> Iterator[str]:
    groups = {axis.group for axis in program.mesh}
    for node in program.graph.nodes:
        if op_info.is_collective(node) and node.args[-1] not in groups:
            yield f"{node.name} uses the group {node.args[-1]!r}, which is no axis of the mesh"


def _writes_only_to_temporaries_and_targets(program: Program) -> Iterator[str]:
    targets = {output.target for output in program.outputs if output.kind is OutputKind.WRITE}
    for index, node in enumerate(program.placeholders):
        if index in targets:
            continue
        for user in node.users:
            mutated = user.op == "call_function" and op_info.written_by(user.target, user.kwargs)
            if mutated and any(node in _flat(user.args[i]) for i in mutated if i < len(user.args)):
                name = program.inputs[index].name
                yield f"{user.name} ({user.target}) writes to the input {name}, which has no write output"


def _writes_are_done(program: Program) -> Iterator[str]:
    # Nothing after the graph stores a value: at this stage the result of a WRITE is None.
    for output, result in zip(program.outputs, program.results, strict=True):
        if output.kind is OutputKind.WRITE and result is not None:
            yield f"{result} is still to be written to {output.name}"


def _freed_inputs_are_not_read(program: Program) -> Iterator[str]:
    for node, record in zip(program.placeholders, program.inputs, strict=True):
        for user in node.users if record.freed else ():
            filled = (
                user.op == "call_function" and node not in _flat(user.args[1:]) and op_info.written_by(user.target, {})
            )
            if not filled and not op_info.reads_no_values(user.target):
                yield f"{user.name} ({user.target}) reads {record.name}, which has no memory"


def _flat(arg: object) -> list[object]:
    return list(arg) if isinstance(arg, (list, tuple)) else [arg]


_ALWAYS: tuple[Rule, ...] = (
    _records_match_the_graph,
    _targets_exist,
    _writes_keep_shape_and_dtype,
    _known_node_kinds,
    _every_node_has_a_value,
    _no_raw_collectives,
    _freed_inputs_are_not_read,
)
RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: (*_ALWAYS, _functional),
    Stage.PLACED: (*_ALWAYS, _functional, _no_markers, _collectives_are_waited_for, _collectives_use_the_mesh),
    Stage.SCHEDULED: (
        *_ALWAYS,
        _no_markers,
        _collectives_are_waited_for,
        _collectives_use_the_mesh,
        _writes_only_to_temporaries_and_targets,
        _writes_are_done,
    ),
}


def verify(program: Program) -> None:
    """Checks the program against the rules of its stage. Raises InternalError that names the first bad node."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise InternalError(f"{program.stage.value} program is no valid graph: {str(error).splitlines()[0]}") from error
    for rule in RULES[program.stage]:
        problem = next(rule(program), None)
        if problem is not None:
            name = rule.__name__.strip("_").replace("_", " ")
            raise InternalError(f"{program.stage.value} program breaks '{name}': {problem}")
