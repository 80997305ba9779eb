"""Parts in, DTensors out: what a call of a program that has parts of DTensors does around its run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from wholestep.capture.bind.binding import Binding
from wholestep.capture.bind.captured import BindingSpec
from wholestep.capture.reach.traced_inputs import EntryGradSource
from wholestep.ir.dtensor.layouts import local_tensor
from wholestep.ir.dtensor.shards import dtensor_maker, padded_shard
from wholestep.ir.program import InputKind, Program
from wholestep.runtime.step_timer import Runner


def around(program: Program, spec: BindingSpec, runner: Runner, mesh: DeviceMesh | None) -> Runner:
    """`runner`, which takes gradients from before the call, and gives new gradients and new state, as DTensors.

    What lives between calls comes as parts already: it is bound once.
    """
    outputs: list[tuple[int, Callable[[torch.Tensor], Any]]]
    outputs = [(n, layout.around) for n, layout in enumerate(spec.layouts) if layout is not None]
    if mesh is not None:  # nothing is sharded without one
        cut = ((n, one.shard) for n, one in enumerate(program.outputs) if one.shard is not None)
        outputs += [(n, dtensor_maker(shard, mesh)) for n, shard in cut]
    take: Callable[[Any], torch.Tensor]
    if spec.sees_parts:  # whatever their placements are
        take, inputs = local_tensor, [n for n, one in enumerate(spec.inputs) if isinstance(one, EntryGradSource)]
    else:
        sharded = (n for n, one in enumerate(program.inputs) if one.shard is not None)
        take, inputs = padded_shard, [n for n in sharded if program.inputs[n].kind is InputKind.GRAD]
    if not inputs and not outputs:
        return runner

    def run(flat: list[Any]) -> tuple[Any, ...]:
        for number in inputs:
            flat[number] = take(flat[number])
        results = list(runner(flat))
        for number, whole in outputs:
            results[number] = whole(results[number])
        return tuple(results)

    return run


def with_rank(binding: Binding, program: Program, mesh: DeviceMesh | None) -> Binding:
    """The binding of a captured program for the placed one, which may have the number of this rank as an input more."""
    placed = [one for one in program.inputs[len(binding.inputs) :] if one.kind is InputKind.RANK]
    if not placed:
        return binding
    assert mesh is not None  # nothing is sharded without one
    return binding.with_constants([mesh.get_local_rank(mesh.ndim - 1)])
