"""make_program(trace, functional): a functional graph as a Program in which each input and output has its meaning."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from wholestep.capture.functionalize.functionalize import Functional
from wholestep.capture.functionalize.version_counters import keep_versions
from wholestep.capture.reach.step_context import StepContext
from wholestep.capture.scalars.rank_symbols import axes_of, rank_inputs
from wholestep.capture.tracing.tracer import Trace
from wholestep.ir import graph_edit, node_meta
from wholestep.ir.dtensor.shards import shard_spec
from wholestep.ir.program import Input, InputKind, Output, OutputKind, Placement, Program, Stage

_REPLICATED = (InputKind.PARAM, InputKind.BUFFER, InputKind.OPTIMIZER, InputKind.HYPER, InputKind.GRAD)


def make_program(context: StepContext, trace: Trace, functional: Functional) -> tuple[Program, list[int]]:
    """The program and, per input of it, the place of its placeholder in the trace. Unused inputs are dropped."""
    graph, recorded = functional.module.graph, trace.recorded
    placeholders = graph.find_nodes(op="placeholder")
    records = _input_records(context, trace)
    _resolve_payloads(context, placeholders, graph)
    _numbers_as_inputs(placeholders, records)
    results: Any = graph.output_node().args[0]  # numbers that are returned stand there as inputs by now
    leaves, rest = results[: len(recorded.results)], results[len(recorded.results) :]
    leaves = [one for one in leaves if isinstance(one, fx.Node)]
    rest, versions = rest[: len(rest) - len(recorded.versions)], rest[len(rest) - len(recorded.versions) :]
    writes = {k: v for k, v in functional.writes.items() if v is not placeholders[k]}
    outputs = [
        *(Output(kind=OutputKind.USER, name=f"result.{i}") for i in range(len(leaves))),
        *(Output(kind=OutputKind.GRAD, name=records[slot].name, target=slot) for slot in recorded.grads),
        *(Output(kind=OutputKind.STATE, name=where.spelled(context.state)) for where in recorded.new_state),
        *(Output(kind=OutputKind.WRITE, name=records[k].name, target=k) for k in writes),
    ]
    graph_edit.set_results(graph, [*leaves, *rest, *writes.values()])
    keep_versions(graph, list(zip(recorded.versions, versions, strict=True)), writes.keys())
    graph_edit.remove_dead_code(graph)
    targets = {one.target for one in outputs if one.target is not None}
    is_param = [record.kind is InputKind.PARAM for record in records]
    kept = [i for i, node in enumerate(placeholders) if node.users or i in targets or is_param[i]]
    for index in sorted({*range(len(placeholders))} - {*kept}):
        graph.erase_node(placeholders[index])
    place = {old: new for new, old in enumerate(kept)}
    functional.module.recompile()
    program = Program(
        module=functional.module, inputs=tuple(records[i] for i in kept),
        outputs=tuple(
            one if one.target is None else Output(kind=one.kind, name=one.name, target=place[one.target])
            for one in outputs
        ),
        stage=Stage.CAPTURED, mesh=axes_of(graph, trace.ranks),
    )  # fmt: skip
    return program, kept


def _input_records(context: StepContext, trace: Trace) -> list[Input]:
    return [
        Input(
            kind=row.kind, name=row.name,
            shape=trace.sizes.sizes_of(row.name, row.tensor.shape), dtype=row.tensor.dtype,
            placement=Placement.REPLICATE if row.kind in _REPLICATED else Placement.LOCAL,
            shard=shard_spec(row.tensor),
            trainable=row.trainable, freed=i in trace.storages.freed,
        )
        for i, row in enumerate(context.traced_inputs())
    ] + rank_inputs(trace.ranks)  # fmt: skip


def _resolve_payloads(context: StepContext, placeholders: list[fx.Node], graph: fx.Graph) -> None:
    """Fused kernels read the numbers of groups in the place of their payloads."""
    rows = zip(placeholders, context.traced_inputs(), strict=False)
    boxes = {id(row.tensor): node for node, row in rows if row.kind is InputKind.HYPER}
    context.lifter.replace_payloads(graph, boxes)


def _numbers_as_inputs(placeholders: list[fx.Node], records: list[Input]) -> None:
    """A HYPER input is the number itself: readers of its ``item()`` read the placeholder."""
    replaced = {}
    for node, record in zip(placeholders, records, strict=True):
        if record.kind is InputKind.HYPER:
            for user in node.users:
                node_meta.set_value(node, node_meta.value(user))
                replaced[user] = node
    graph_edit.replace_nodes(replaced)
