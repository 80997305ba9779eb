"""The contenders: who runs a training, each at its best settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.cli.suite.no_comm_bound import SilentStep
from wholestep.cli.suite.workloads import Training
from wholestep.config import Strategy


class Kind(Enum):
    """Who runs the step. The value is what a reader sees."""

    EAGER = "eager DDP"
    OURS = "wholestep"
    LIMIT = "wholestep, communication left out"
    COMPILED_DDP = "torch.compile(DDP)"
    FSDP = "FSDP2, compiled by block"
    OURS_BF16 = "wholestep, gradients in bf16"
    FSDP_OURS = "wholestep, FSDP"
    ZERO1_OURS = "wholestep, ZeRO-1"
    HSDP_OURS = "wholestep, HSDP"
    DDP_COMPILED = "DDP(torch.compile)"
    EAGER_BF16 = "eager DDP, gradients in bf16"
    HSDP = "FSDP2 on two axes, compiled by block"
    JAX = "JAX, jit over a mesh"
    JAX_FSDP = "JAX, fully sharded"


OWN = (Kind.OURS, Kind.LIMIT, Kind.OURS_BF16, Kind.FSDP_OURS, Kind.ZERO1_OURS, Kind.HSDP_OURS)
STOCK = (Kind.EAGER, Kind.COMPILED_DDP, Kind.FSDP, Kind.HSDP, Kind.DDP_COMPILED, Kind.EAGER_BF16)
"""What PyTorch has without us."""
JAX_KINDS = (Kind.JAX, Kind.JAX_FSDP)
"""What runs in a process of its own, without torch's ranks."""
SHARDED_OURS = (Kind.FSDP_OURS, Kind.HSDP_OURS)
"""What has FSDP2's policy of types."""
_SHARDED_STOCK = (Kind.FSDP, Kind.HSDP)
ON_TWO_AXES = (Kind.HSDP_OURS, Kind.HSDP)
"""What wants two replicas, each of two ranks or more."""
_ON_REQUEST = (Kind.EAGER_BF16, *SHARDED_OURS, Kind.ZERO1_OURS, Kind.HSDP, Kind.JAX_FSDP)
DEFAULT = tuple(kind for kind in Kind if kind not in _ON_REQUEST)
"""The order in which contenders are opened: what others are compared with comes first."""

LEARNING_RATE = 1e-4

_STRATEGIES: dict[Kind, Strategy] = {
    Kind.OURS_BF16: ws.DDP(compress=ws.CastCompress(torch.bfloat16)),
    Kind.ZERO1_OURS: ws.ZeRO(),
}
"""Of the contenders of ours that are not plain data parallel, but for FSDP, whose types are those of the training."""


@dataclass(slots=True, kw_only=True)
class Contender:
    """A training that is ready to run: ``call()`` is one step and gives the loss."""

    kind: Kind
    call: Callable[[], Tensor]
    step: ws.CompiledStep | None
    """The compiled step of a contender of ours."""


def prepare(kind: Kind, training: Training, world: ws.World) -> Contender:
    """Builds a contender on this rank; all start from the same weights.

    Every rank has to.
    """
    mesh = _two_axes(world) if kind in ON_TWO_AXES else None
    torch.manual_seed(0)
    x, y = (one.to(world.device) for one in training.draw(world.rank))
    model = training.build(world.device)
    if kind in OWN:
        optimizer = _optimizer(model)
        strategy, function = _STRATEGIES.get(kind, ws.DDP()), training.step
        if kind in SHARDED_OURS:  # FSDP2's own policy, as its contender has it: the same types in all places
            strategy = ws.FSDP(reshard_after_forward=True, mp_policy=_policy(training))
            function = training.sharded_step
        compiled = ws.compile(function, strategy=strategy, mesh=mesh, backend="inductor", fullgraph=True)
        step = SilentStep(training.step) if kind is Kind.LIMIT else compiled
        return Contender(kind=kind, call=lambda: step(model, optimizer, x, y), step=step)
    is_sharded = kind in _SHARDED_STOCK
    wrapped = _sharded(model, training, mesh) if is_sharded else _replicated(kind, model, world)
    optimizer = _optimizer(wrapped)
    plain = training.sharded_step if is_sharded else training.step
    return Contender(kind=kind, call=lambda: plain(wrapped, optimizer, x, y), step=None)


def _two_axes(world: ws.World) -> DeviceMesh:
    """Two replicas, each sharded over half of the ranks."""
    names = ("dp_replicate", "dp_shard")
    return init_device_mesh(world.device.type, (2, world.size // 2), mesh_dim_names=names)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _replicated(kind: Kind, model: nn.Module, world: ws.World) -> nn.Module:
    """DistributedDataParallel around the compiled model, or compiled itself, or neither."""
    if kind is Kind.DDP_COMPILED:
        model.compile()
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        static_graph=kind is Kind.DDP_COMPILED,
    )
    if kind is Kind.EAGER_BF16:
        ddp.register_comm_hook(None, bf16_compress_hook)
    if kind is Kind.COMPILED_DDP:
        ddp.compile()  # in place: it stays a module, and DistributedDataParallel knows to split the graph
    return ddp


def _policy(training: Training) -> MixedPrecisionPolicy:
    """Gathered in the type of the training, reduced in float32."""
    low = training.dtype if training.dtype is not torch.float32 else None
    return MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)


def _sharded(model: nn.Module, training: Training, mesh: DeviceMesh | None) -> nn.Module:
    """The model under FSDP2 on `mesh`, or on all ranks, with its blocks compiled one by one."""
    policy = _policy(training)
    blocks: Iterable[nn.Module] | None = getattr(model, "blocks", None)
    if blocks is None:
        model.compile()
    for block in blocks or ():
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model
