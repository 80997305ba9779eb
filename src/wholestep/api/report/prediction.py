"""Predicts when the collectives of a program run, which computation hides them, and its peak of memory.

Source of the categories of memory: those that PyTorch's memory profiler tells apart, with what buckets take besides.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from wholestep.cost.cost_model import CostModel
from wholestep.cost.liveness import at_peak
from wholestep.cost.simulator import Timeline, simulate
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import BucketKind, Region
from wholestep.ir.program import InputKind, OutputKind, Program
from wholestep.passes.analysis.task_graph import Tasks, sharing, tasks_of


class Category(enum.StrEnum):
    """Purposes of memory."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"  # what the backward gives and updates or buckets read
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"  # whatever else forward and backward make
    BUCKETS = "buckets"  # what gradients travel in, compressed or not
    GATHERED = "gathered parameters"  # whole ones, of shards, and what of the shards travels
    OTHER = "other"  # arguments, buffers of modules, what updates and the like make for themselves


_CATEGORY_OF_INPUT = {
    InputKind.PARAM: Category.PARAMETERS,
    InputKind.GRAD: Category.GRADIENTS,
    InputKind.OPTIMIZER: Category.OPTIMIZER,
}
_TRAINING = (Region.FORWARD, Region.BACKWARD, Region.RECOMPUTE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentCompute:
    """Computation that runs while a collective is in flight."""

    region: str
    module: str
    """A module, down to the first number in its name: ``blocks.3`` for ``blocks.3.mlp.up``."""
    us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommInterval:
    """One collective on the predicted clock, microseconds from the start of the step."""

    start_us: float
    end_us: float
    exposed_us: float
    """How long the device stands still for it."""
    hidden_by: tuple[ConcurrentCompute, ...]
    """Computation of the device meanwhile, the longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """The moment at which the most bytes are alive, those of the inputs among them."""

    num_bytes: int
    by_category: dict[str, int]
    """`Category` -> bytes; they add up to `num_bytes`."""
    node: str
    """The node that runs then; empty where none does."""
    region: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step on the predicted clock. Its first three times add up to `device_us`."""

    compute_us: float
    """Computation, as if nothing were in flight."""
    slowdown_us: float
    """How much longer it takes because collectives are in flight, some of them at its end."""
    exposed_us: float
    """How long the device stands still for collectives."""
    host_us: float
    """Time that the host needs to drive the device; 0 where both are one thread, and the time is in `compute_us`."""
    cost_source: str
    """Where the costs come from."""

    @property
    def device_us(self) -> float:
        """Time that the device needs."""
        return self.compute_us + self.slowdown_us + self.exposed_us

    @property
    def step_us(self) -> float:
        """The step: as long as the slower of the two needs."""
        return max(self.device_us, self.host_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPrediction:
    """Everything that is predicted about a program."""

    step: Prediction
    comm_intervals: dict[fx.Node, CommInterval]
    """For each collective."""
    peak: PeakMemory


def predict(program: Program, cost: CostModel, *, one_launch: bool = False) -> ProgramPrediction:
    """Runs the nodes of `program` in their order on the clock of `cost.simulator`; nothing is changed.

    `one_launch`: the host launches the whole step at once, as one CUDA graph.
    """
    tasks = tasks_of(program, cost)
    timeline = simulate(tasks.tasks, sharing=sharing(cost))
    compute_us = sum(task.us for task in tasks.tasks)
    step = Prediction(
        compute_us=compute_us,
        slowdown_us=timeline.total_us - timeline.total_exposed_us - compute_us,
        exposed_us=timeline.total_exposed_us,
        host_us=0.0 if cost.device.host_is_device else cost.launch_us if one_launch else _host_us(tasks, cost),
        cost_source=cost.source,
    )
    return ProgramPrediction(step=step, comm_intervals=_comm_intervals(tasks, timeline), peak=_peak(program, tasks))


def _host_us(tasks: Tasks, cost: CostModel) -> float:
    return sum(cost.launch_us if op_info.is_collective(node) else cost.host_us(node) for node in tasks.nodes)


def _comm_intervals(tasks: Tasks, timeline: Timeline) -> dict[fx.Node, CommInterval]:
    return {
        tasks.nodes[number]: CommInterval(
            start_us=start_us,
            end_us=timeline.comm_end_us[number],
            exposed_us=timeline.exposed_us[number],
            hidden_by=_concurrent_compute(tasks, timeline, start_us, timeline.comm_end_us[number]),
        )
        for number, start_us in sorted(timeline.comm_start_us.items())
    }


def _concurrent_compute(
    tasks: Tasks, timeline: Timeline, start_us: float, end_us: float
) -> tuple[ConcurrentCompute, ...]:
    """Computation between two moments, by region of the step and module."""
    spent: dict[tuple[str, str], float] = {}
    for node, task, begin_us, until_us in zip(
        tasks.nodes, tasks.tasks, timeline.start_us, timeline.end_us, strict=True
    ):
        us = min(until_us, end_us) - max(begin_us, start_us)
        if us > 0 and not task.waits_for:
            origin = node_meta.origin(node)
            key = (origin.region.value, _layer_of(origin.module))
            spent[key] = spent.get(key, 0.0) + us
    longest = sorted(spent.items(), key=lambda entry: (-entry[1], entry[0]))
    return tuple(ConcurrentCompute(region=region, module=module, us=us) for (region, module), us in longest)


def _layer_of(module: str) -> str:
    """``blocks.3.mlp.up`` -> ``blocks.3``; a name without a number stays as it is."""
    parts = module.split(".")
    numbered = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])


def _peak(program: Program, tasks: Tasks) -> PeakMemory:
    by_category = dict.fromkeys(Category, 0)
    for record, node in zip(program.inputs, program.placeholders, strict=True):
        if not record.freed:
            by_category[_CATEGORY_OF_INPUT.get(record.kind, Category.OTHER)] += node_meta.num_bytes(node)
    peak = at_peak(tasks.usages, pinned=tasks.pinned, writable=tasks.writable)
    category_of = dict(_categories(program, tasks))
    for buffer, num_bytes in peak.alive.items():
        by_category[category_of[buffer]] += num_bytes
    running = tasks.nodes[peak.task] if tasks.nodes else None
    origin = node_meta.UNKNOWN if running is None else node_meta.origin(running)
    return PeakMemory(
        num_bytes=sum(by_category.values()),
        by_category={category.value: num_bytes for category, num_bytes in by_category.items()},
        node="" if running is None else running.name,
        region=origin.region.value,
        module=origin.module,
    )


def _categories(program: Program, tasks: Tasks) -> Iterator[tuple[int, Category]]:
    """The category of each buffer that a node makes."""
    homes = dict(zip(tasks.nodes, tasks.homes, strict=True))
    carried = {
        buffer: Category.GATHERED if record.kind is BucketKind.GATHER else Category.BUCKETS
        for node in tasks.nodes
        if op_info.is_collective(node) and (record := node_meta.bucket(node)) is not None
        for one in (node, *node.all_input_nodes)
        for buffer in homes.get(one, ())
    }
    ends = [(output, value) for output, value in zip(program.outputs, program.results, strict=True) if value in homes]
    states = {buffer for output, value in ends if output.kind is OutputKind.STATE for buffer in homes[value]}
    final = {buffer for output, value in ends if output.kind is OutputKind.GRAD for buffer in homes[value]}
    for node, usage, home in zip(tasks.nodes, tasks.usages, tasks.homes, strict=True):
        if node_meta.origin(node).region not in _TRAINING or not carried.keys().isdisjoint(home):
            final.update(usage.reads)
    for node, usage in zip(tasks.nodes, tasks.usages, strict=True):
        region = node_meta.origin(node).region
        for make in usage.makes:
            if make.buffer in carried:
                yield make.buffer, carried[make.buffer]
            elif make.buffer in states:
                yield make.buffer, Category.OPTIMIZER
            elif make.buffer in final and region is Region.BACKWARD:
                yield make.buffer, Category.GRADIENTS
            else:
                yield make.buffer, Category.ACTIVATIONS if region in _TRAINING else Category.OTHER
