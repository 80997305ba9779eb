"""What each strategy places, and place(): Program[CAPTURED] -> Program[PLACED]."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.fx as fx

from wholestep.config import DataParallelOptions, Strategy
from wholestep.errors import PlacementError
from wholestep.ir import node_meta, op_info
from wholestep.ir.graph_edit import remove_dead_code
from wholestep.ir.node_meta import Bucket
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.program import Input, InputKind, MeshAxis, OutputKind, Program
from wholestep.ir.verifier import verify
from wholestep.place.interpreter import Placer
from wholestep.place.rules import RULES

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Replicated parameters; gradients reduced over the axis; buffers broadcast from rank 0.

    The arithmetic is that of DistributedDataParallel: a gradient is multiplied by 1/size, then summed.
    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    config: DataParallelOptions
    axis: MeshAxis

    def begin(self, placer: Placer) -> None:
        """Broadcasts the buffers that the step writes.

        Those that it only reads are the executable's to keep equal.
        """
        if not self.config.broadcast_buffers:
            return
        program = placer.program
        written = {o.target for o in program.outputs if o.kind is OutputKind.WRITE} - program.host_buffers
        chosen = [
            (record, node)
            for index, (record, node) in enumerate(zip(program.inputs, program.placeholders, strict=True))
            if record.kind is InputKind.BUFFER and node.users and index in written
        ]
        for _, group in groupby(sorted(chosen, key=_dtype_name), key=_dtype_name):
            self._broadcast(placer, list(group))

    def _broadcast(self, placer: Placer, buffers: list[tuple[Input, fx.Node]]) -> None:
        nodes = [placer.values[node] for _, node in buffers]
        like = nodes[0]
        flat = [placer.emit(_aten.reshape.default, node, [-1], like=like) for node in nodes]
        joined = placer.emit(_aten.cat.default, flat, like=like) if len(flat) > 1 else flat[0]
        sent = placer.emit(op_info.c10d.broadcast.default, joined, 0, self.axis.group, like=like)
        received = placer.emit(op_info.WAIT, sent, like=like)
        start = 0
        for (record, old), node in zip(buffers, nodes, strict=True):
            count = node_meta.tensor(node).numel()
            part = placer.emit(_aten.slice.Tensor, received, 0, start, start + count, like=like)
            placer.values[old] = placer.emit(_aten.view.default, part, list(record.shape), like=like)
            start += count
        placer.notes.append(
            f"{len(buffers)} buffers that the step writes are broadcast from rank 0 at its start: "
            f"{start} elements of {buffers[0][0].dtype} in one message"
        )

    def reduce_gradient(self, placer: Placer, grad: fx.Node, name: str) -> fx.Node:
        """``wait(all_reduce(grad * 1/size))``; the bucketing pass merges these."""
        if name in self.config.ignore:
            return grad
        scaled = grad
        if self.config.reduce == "mean":
            scaled = placer.emit(_aten.mul.Tensor, grad, 1.0 / self.axis.size, like=grad)
        reduced = placer.emit(op_info.c10d.all_reduce.default, scaled, "sum", self.axis.group, like=grad)
        node_meta.set_bucket(reduced, Bucket(0, (name,), node_meta.num_bytes(grad), node_meta.UNBUCKETED))
        return placer.emit(op_info.WAIT, reduced, like=grad)


@dataclass(frozen=True, slots=True)
class Alone:
    """One process: a gradient is final where it is marked."""

    axis: MeshAxis

    def begin(self, placer: Placer) -> None:
        """Nothing to do."""

    def reduce_gradient(self, placer: Placer, grad: fx.Node, name: str) -> fx.Node:
        """The gradient itself."""
        return grad


def _dtype_name(entry: tuple[Input, Any]) -> str:
    return str(entry[0].dtype)


@without_autocast()
def place(program: Program, config: Strategy | None, axis: MeshAxis | None) -> Program:
    """Spreads a captured program over one mesh axis. `config` None, or no axis: one process.

    Raises:
        PlacementError: for names in ``ignore`` that are no parameter of the step.
    """
    params = {record.name for record in program.inputs if record.kind is InputKind.PARAM}
    unknown = sorted(set(config.ignore) - params) if config is not None else []
    if unknown:
        raise PlacementError(
            f"{type(config).__name__}(ignore=...) names {unknown}, but the step's parameters are {sorted(params)}."
        )
    alone = MeshAxis(name="data", size=1, group="")
    strategy: DataParallel | Alone = Alone(alone)
    if config is not None and axis is not None and axis.size > 1:
        strategy = DataParallel(config, axis)
    placed = Placer(program, strategy, RULES).run()
    remove_dead_code(placed.graph)
    placed.module.recompile()
    verify(placed)
    return placed
