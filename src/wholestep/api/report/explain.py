"""explain(): reads a program, and the times of its calls if there are some; changes neither."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch.fx as fx

from wholestep.api.report.prediction import CommInterval, predict
from wholestep.api.report.records import Collective, Explanation, MeasuredStep, PassLine
from wholestep.api.report.size_report import NO_SIZES, SizeReport
from wholestep.cost.cost_model import CostModel
from wholestep.ir import graph_edit, node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.ir.ops.collectives import SCATTER
from wholestep.ir.program import InputKind, Program
from wholestep.runtime.step_timer import StepTimes

_BUFFERS = "buffers of rank 0 before the step"


def explain(
    program: Program,
    *,
    step: str,
    strategy: str,
    backend: str,
    cost: CostModel,
    one_launch: bool = False,
    measured: StepTimes | None = None,
    loaded_from: str = "",
    sizes: SizeReport = NO_SIZES,
) -> Explanation:
    """Describes a program of any stage; collectives appear from PLACED on.

    Args:
        step, strategy, backend: names.
        cost: what predictions are made from.
        one_launch: the host launches the whole step at once, as one CUDA graph.
        measured: times of calls of this very program.
        loaded_from: the file that it comes from; empty if it was captured.
        sizes: those that are no constants.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    regions = {region.value: sum(node_meta.origin(node).region is region for node in nodes) for region in Region}
    params = [
        (record, node)
        for record, node in zip(program.inputs, program.placeholders, strict=True)
        if record.kind is InputKind.PARAM
    ]
    predicted = predict(program, cost, one_launch=one_launch)
    return Explanation(
        step=step,
        strategy=strategy,
        backend=backend,
        loaded_from=loaded_from,
        num_ranks=max((axis.size for axis in program.mesh), default=1),
        num_params=len(params),
        param_bytes=sum(node_meta.num_bytes(node) for _, node in params),
        num_nodes=len(nodes),
        nodes_by_region={name: count for name, count in regions.items() if count},
        collectives=tuple(_collectives(program, predicted.comm_intervals, measured)),
        predicted=predicted.step,
        peak=predicted.peak,
        measured=_summary(measured) if measured is not None else None,
        sizes=sizes,
        fallbacks=program.fallbacks,
        passes=tuple(
            PassLine(name=r.name or "place", time_ms=r.time_ms, num_nodes=r.num_nodes, notes=r.notes)
            for r in program.history
        ),
    )


def _collectives(
    program: Program, comm_intervals: dict[fx.Node, CommInterval], measured: StepTimes | None
) -> Iterator[Collective]:
    axes = {axis.group: axis.name for axis in program.mesh}
    waited_us = _waited_us(program, measured) if measured is not None else {}
    for number, (node, interval) in enumerate(
        (node, comm_intervals[node]) for node in program.graph.nodes if node in comm_intervals
    ):
        carried = list(graph_edit.nodes_of(node.args[1] if node.target is SCATTER else node.args[0]))
        bucket, source = node_meta.bucket(node), node_meta.origin(node).source
        yield Collective(
            number=number,
            op=node.target._schema.name.split("::")[1].removesuffix("_"),
            dtype=str(node_meta.tensor(carried[0]).dtype).removeprefix("torch."),
            num_bytes=sum(map(node_meta.num_bytes, carried)),
            gradient_bytes=bucket.num_bytes if bucket else 0,
            axis=axes.get(str(node.args[-1]), str(node.args[-1])),
            members=bucket.members if bucket else (),
            kind=bucket.kind.value if bucket else "",
            phase=bucket.phase if bucket else "",
            reason=bucket.reason if bucket else f"called at {source}" if source else _BUFFERS,
            start_us=interval.start_us,
            predicted_us=interval.end_us - interval.start_us,
            exposed_us=interval.exposed_us,
            hidden_by=interval.hidden_by,
            measured_exposed_us=waited_us.get(node, 0.0) if measured is not None else None,
        )


def _waited_us(program: Program, measured: StepTimes) -> dict[fx.Node, float]:
    """For each collective, the measured time of its waits."""
    waited_us: dict[fx.Node, float] = {}
    for number, wait in enumerate(program.graph.find_nodes(op="call_function", target=op_info.WAIT)):
        start = op_info.waited_for(wait)
        waited_us[start] = waited_us.get(start, 0.0) + measured.wait_us(number)
    return waited_us


def _summary(measured: StepTimes) -> MeasuredStep:
    ordered = sorted(measured.step_us)
    return MeasuredStep(
        num_calls=len(ordered),
        step_us=statistics.median(ordered),
        p10_us=ordered[len(ordered) // 10],
        p90_us=ordered[(9 * len(ordered)) // 10],
        exposed_us=statistics.median(map(sum, measured.waits_us)),
    )
