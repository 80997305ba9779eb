"""How a strategy cuts the inputs of a program captured from whole tensors: for one process that plays all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from wholestep.config import FSDP, Strategy, ZeRO
from wholestep.ir.dtensor.shards import default_dim
from wholestep.ir.program import Input, InputKind, MeshAxis, Program, ShardSpec
from wholestep.place.sharded_placer import param_of


def shard_inputs(program: Program, config: Strategy, axes: tuple[MeshAxis, ...]) -> Program:
    """The captured program with `Input.shard` as live objects have it that the strategy has sharded.

    FSDP cuts parameters, what optimizers keep of them in their shape, and their gradients; ZeRO what optimizers keep,
    and from stage 2 on the gradients. Single numbers and what the strategy ignores stay whole.

    Args:
        axes: first the one that tensors are cut over.
    """
    if not isinstance(config, (FSDP, ZeRO)) or not axes or axes[0].size < 2:
        return program
    kinds = {InputKind.OPTIMIZER}
    if isinstance(config, FSDP):
        kinds |= {InputKind.PARAM, InputKind.GRAD}
    elif config.stage == 2:
        kinds |= {InputKind.GRAD}
    params = {one.name: one for one in program.inputs if one.kind is InputKind.PARAM}

    def cut(record: Input) -> Input:
        owner = record if record.kind is InputKind.PARAM else param_of(record, params)
        if record.kind not in kinds or owner is None or owner.name in config.ignore:
            return record
        spec = _spec(owner, config, axes[0])
        return record if spec is None else replace(record, shard=spec)

    return replace(program, inputs=tuple(map(cut, program.inputs)))


def _spec(param: Input, config: FSDP | ZeRO, axis: MeshAxis) -> ShardSpec | None:
    if not param.constant_shape:
        return None
    dim = default_dim(param.constant_shape, axis.size)
    if isinstance(config, FSDP) and config.shard_placement_fn is not None:
        chosen = config.shard_placement_fn(
            nn.Parameter(torch.empty(param.constant_shape, dtype=param.dtype, device="meta"))
        )
        dim = 0 if chosen is None else chosen.dim
    return ShardSpec(axis=axis.name, num_ranks=axis.size, dim=dim, whole_shape=param.constant_shape)
