"""Parts in, DTensors out: what a call of a sharded program does around its run."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from wholestep.capture.bind.binding import Binding
from wholestep.ir.dtensor.shards import as_dtensor, padded_shard
from wholestep.ir.program import InputKind, Program
from wholestep.runtime.step_timer import Runner


def around(program: Program, runner: Runner, mesh: DeviceMesh) -> Runner:
    """`runner`, which takes gradients from before the call, and gives new gradients and new state, as DTensors.

    What lives between calls comes as parts already: it is bound once.
    """
    inputs = [n for n, one in enumerate(program.inputs) if one.shard is not None and one.kind is InputKind.GRAD]
    outputs = [(n, one.shard) for n, one in enumerate(program.outputs) if one.shard is not None]
    if not inputs and not outputs:
        return runner

    def run(flat: list[Any]) -> tuple[Any, ...]:
        for number in inputs:
            flat[number] = padded_shard(flat[number])
        results = list(runner(flat))
        for number, spec in outputs:
            results[number] = as_dtensor(results[number], spec, mesh)
        return tuple(results)

    return run


def with_rank(binding: Binding, program: Program, mesh: DeviceMesh | None) -> Binding:
    """The binding of a captured program for the placed one, which may have the number of this rank as an input more."""
    placed = [one for one in program.inputs[len(binding.inputs) :] if one.kind is InputKind.RANK]
    if not placed:
        return binding
    assert mesh is not None  # nothing is sharded without one
    return binding.with_constants([mesh.get_local_rank(mesh.ndim - 1)])
