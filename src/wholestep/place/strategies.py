"""What each strategy places, and place(): Program[CAPTURED] -> Program[PLACED]."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.fx as fx

from wholestep.config import FSDP, DataParallelOptions, Strategy, ZeRO
from wholestep.errors import PlacementError
from wholestep.ir import node_meta, op_info
from wholestep.ir.graph_edit import remove_dead_code
from wholestep.ir.node_meta import Bucket
from wholestep.ir.ops.dispatch_guard import without_autocast
from wholestep.ir.program import Input, InputKind, MeshAxis, OutputKind, Program
from wholestep.ir.verifier import verify
from wholestep.place import layouts
from wholestep.place.interpreter import Placer
from wholestep.place.layouts import Unreduced
from wholestep.place.rules import RULES
from wholestep.place.sharded_placer import ShardedPlacer
from wholestep.place.sharded_rules import RulePlacer

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Replicated parameters; gradients reduced over the axes; buffers broadcast from rank 0.

    The arithmetic is that of DistributedDataParallel: a gradient is multiplied by 1/size, then summed.
    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    config: DataParallelOptions
    axes: tuple[MeshAxis, ...]

    @property
    def axis(self) -> MeshAxis:
        """The first axis: the one over which state is cut, if any is."""
        return self.axes[0]

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
            and record.name not in self.config.ignore
        ]  # fmt: skip
        for _, group in groupby(sorted(chosen, key=_dtype_name), key=_dtype_name):
            self._broadcast(placer, list(group))

    def _broadcast(self, placer: Placer, buffers: list[tuple[Input, fx.Node]]) -> None:
        nodes = [placer.values[node] for _, node in buffers]
        like = nodes[0]
        flat = [placer.emit(_aten.reshape.default, node, [-1], like=like) for node in nodes]
        joined = placer.emit(_aten.cat.default, flat, like=like) if len(flat) > 1 else flat[0]
        received = joined
        for axis in self.axes:
            sent = placer.emit(op_info.c10d.broadcast.default, received, 0, axis.group, like=like)
            received = placer.emit(op_info.WAIT, sent, like=like)
        start = 0
        for (record, old), node in zip(buffers, nodes, strict=True):
            count = node_meta.tensor(node).numel()
            shard = placer.emit(_aten.slice.Tensor, received, 0, start, start + count, like=like)
            placer.values[old] = placer.emit(_aten.view.default, shard, list(record.shape), like=like)
            start += count
        placer.notes.append(
            f"{len(buffers)} buffers that the step writes are broadcast from rank 0 at its start: "
            f"{start} elements of {buffers[0][0].dtype} in one message"
        )

    def reduce_gradient(self, placer: Placer, grad: fx.Node, name: str) -> fx.Node:
        """``wait(all_reduce(grad * 1/size))``; the bucketing pass merges these."""
        if name in self.config.ignore:
            return grad
        if node_meta.tensor(grad).layout is torch.sparse_coo:
            placer.notes.append(f"{name} has a sparse gradient: the entries of all ranks are gathered, as they are")
            return self._joined(placer, grad)
        reduced = self.scaled(placer, grad)
        for axis in self.axes:
            reduced = self.all_reduced(placer, reduced, name, axis)
        return reduced

    def _joined(self, placer: Placer, grad: fx.Node) -> fx.Node:
        """A sparse gradient whose entries are those of all ranks: several of one index count as their sum."""
        sparse = node_meta.tensor(grad)
        indices = placer.emit(_aten.t.default, placer.emit(_aten._indices.default, grad, like=grad), like=grad)
        values = self.scaled(placer, placer.emit(_aten._values.default, grad, like=grad))
        for axis in self.axes:
            indices, values = (layouts.gathered_rows(placer, one, axis) for one in (indices, values))
        return placer.emit(
            _aten._sparse_coo_tensor_with_dims_and_tensors.default, sparse.sparse_dim(), sparse.dense_dim(),
            list(sparse.shape), placer.emit(_aten.t.default, indices, like=grad), values, like=grad,
            dtype=sparse.dtype, layout=torch.sparse_coo, device=sparse.device,
        )  # fmt: skip

    def scaled(self, placer: Placer, grad: fx.Node) -> fx.Node:
        """The share of the gradient of this rank in what is summed."""
        if self.config.reduce != "mean":
            return grad
        return placer.emit(_aten.mul.Tensor, grad, 1.0 / prod(axis.size for axis in self.axes), like=grad)

    def all_reduced(self, placer: Placer, grad: fx.Node, name: str, axis: MeshAxis) -> fx.Node:
        """The sum over an axis."""
        start = placer.emit(op_info.c10d.all_reduce.default, grad, "sum", axis.group, like=grad)
        node_meta.set_bucket(start, Bucket(0, (name,), node_meta.num_bytes(grad), node_meta.UNBUCKETED))
        return placer.emit(op_info.WAIT, start, like=grad)


@dataclass(frozen=True, slots=True)
class ShardedDataParallel(DataParallel):
    """Data parallel with state in parts: gradients are reduced to the part that the optimizer of a rank needs.

    Over a second axis, on which parts are equal, they are summed after that.
    """

    def reduce_gradient(self, placer: Placer, grad: Any, name: str) -> fx.Node:
        """``wait(reduce_scatter(grad * 1/size))``; as `DataParallel` for what is cut nowhere."""
        assert isinstance(placer, ShardedPlacer)
        spec = placer.param_specs.get(name)
        if isinstance(grad, Unreduced):
            reduced = self.reduce_gradient(placer, grad.local, name)
            total = placer.emit(_aten.add.Tensor, grad.reduced, reduced, like=grad.local)
            placer.layouts[total] = grad.spec
            return total
        if placer.layout(grad) is not None and placer.layout(grad) == spec and name not in self.config.ignore:
            return self._of_parameters_alone(placer, grad)
        grad = placer.whole(grad, "backward")
        if spec is None or name in self.config.ignore:
            return DataParallel.reduce_gradient(self, placer, grad, name)
        dtype, wire_dtype = node_meta.tensor(grad).dtype, self._reduce_dtype(node_meta.tensor(grad).dtype)
        sent = grad if wire_dtype is dtype else placer.emit(_aten._to_copy.default, grad, like=grad, dtype=wire_dtype)
        shard = layouts.reduce_scatter(placer, self.scaled(placer, sent), spec, self.axis, name)
        for axis in self.axes[1:]:
            shard = self.all_reduced(placer, shard, name, axis)
        if wire_dtype is not dtype:
            shard = placer.emit(_aten._to_copy.default, shard, like=shard, dtype=dtype)
        placer.layouts[shard] = spec
        return shard

    def _reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which a gradient is reduced: as `fully_shard` has it, that of parameters unless told."""
        policy = self.config.mp_policy if isinstance(self.config, FSDP) else None
        if policy is None or not dtype.is_floating_point:
            return dtype
        return policy.reduce_dtype or policy.param_dtype or dtype

    def _of_parameters_alone(self, placer: ShardedPlacer, shard: fx.Node) -> fx.Node:
        """A gradient that was computed on parts is the same on every rank: its mean is what it is."""
        if self.config.reduce == "mean":
            return shard
        total = placer.emit(_aten.mul.Tensor, shard, float(prod(axis.size for axis in self.axes)), like=shard)
        placer.layouts[total] = placer.layouts[shard]
        return total


@dataclass(frozen=True, slots=True)
class Alone:
    """One process: a gradient is final where it is marked."""

    axes: tuple[MeshAxis, ...]

    @property
    def axis(self) -> MeshAxis:
        """An axis of one rank."""
        return self.axes[0]

    def begin(self, placer: Placer) -> None:
        """Nothing to do."""

    def reduce_gradient(self, placer: Placer, grad: fx.Node, name: str) -> fx.Node:
        """The gradient itself."""
        return grad


def _dtype_name(entry: tuple[Input, Any]) -> str:
    return str(entry[0].dtype)


@without_autocast()
def place(
    program: Program, config: Strategy | None, axes: tuple[MeshAxis, ...], *, again: Collection[str] = ()
) -> Program:
    """Spreads a captured program over mesh axes: the first one, over which its inputs may be cut, and others.

    `config` None, or no axis: one process. `again`: names of inputs that the backward gathers again, where `config`
    does not say so of all.

    Raises:
        PlacementError: for names in ``ignore`` that are no parameter or buffer of the step.
    """
    known = {record.name for record in program.inputs if record.kind in (InputKind.PARAM, InputKind.BUFFER)}
    unknown = sorted(set(config.ignore) - known) if config is not None else []
    if unknown:
        raise PlacementError(
            f"{type(config).__name__}(ignore=...) names {unknown}, but the step's parameters and buffers are "
            f"{sorted(known)}."
        )
    placed = _placer(program, config, axes, again).run()
    remove_dead_code(placed.graph)
    placed.module.recompile()
    verify(placed)
    return placed


def _placer(program: Program, config: Strategy | None, axes: tuple[MeshAxis, ...], again: Collection[str]) -> Placer:
    is_cut = any(record.shard is not None for record in program.inputs)
    if config is None or prod(axis.size for axis in axes) == 1:
        if is_cut:
            raise PlacementError("The step has sharded tensors, and runs on one process or without a strategy.")
        return Placer(program, Alone((MeshAxis(name="data", size=1, group=""),)), RULES)
    if is_cut:
        is_all = isinstance(config, FSDP) and config.reshard_after_forward is True
        shard_grads = not (isinstance(config, ZeRO) and config.stage == 1)
        strategy = ShardedDataParallel(config, axes)
        return RulePlacer(program, strategy, RULES, again=None if is_all else again, shard_grads=shard_grads)
    return Placer(program, DataParallel(config, axes), RULES)
