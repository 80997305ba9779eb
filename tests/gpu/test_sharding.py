"""Sharded steps on GPUs: the numbers of eager DistributedDataParallel and fully_shard, in one CUDA graph.

In float64, where a difference is a fault and no rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from tests.unit.lower.inductor.test_segment_compiler import TOLERANCE
from wholestep.cli.workloads.gpt import GPT, NUM_BYTES, GPTConfig, next_byte_loss, train_step
from wholestep.config import Strategy
from wholestep.ir import op_info
from wholestep.ir.ops.collectives import ALL_GATHER_INTO

pytestmark = pytest.mark.gpu

CONFIG = GPTConfig(num_layers=3, num_heads=2, width=64, context=32)
CALLS = 8
STRATEGIES: dict[str, Strategy] = {
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
    "fsdp_keep": ws.FSDP(reshard_after_forward=False),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one rank saw of a training."""

    faults: list[str]
    """What is not as in eager code."""
    backend: str
    gathers: dict[str, int]
    """Collectives that bring parameters, by the part of the step that they are for."""
    gather_operators: set[str]
    copied: str
    """What the step copies into inputs at its end, in words."""
    moved: list[str]
    """Parameters that lie elsewhere than after the first call."""


def training(device: torch.device) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = GPT(CONFIG).double().to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch(call: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(10 * call + rank)
    x, y = (torch.randint(NUM_BYTES, (2, CONFIG.context), generator=drawn) for _ in range(2))
    return x.to(device), y.to(device)


def eager(strategy: Strategy, world: ws.World) -> tuple[nn.Module, Optimizer]:
    """The same model under fully_shard where the strategy is FSDP, else under DistributedDataParallel."""
    model, opt = training(world.device)
    if not isinstance(strategy, ws.FSDP):
        return DistributedDataParallel(model, device_ids=[world.device.index]), opt
    for unit in (*model.blocks, model):  # type: ignore[misc]
        fully_shard(unit, mesh=world.mesh, reshard_after_forward=bool(strategy.reshard_after_forward))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def close(want: Tensor, came: Tensor) -> bool:
    return torch.allclose(want, came, rtol=TOLERANCE, atol=TOLERANCE)


def trained(strategy: Strategy, reference: Strategy, shape: tuple[int, ...]) -> Seen:
    """Some calls beside eager code, and what there is to see of the compiled step after them."""
    world = ws.init()
    torch.cuda.set_device(world.device)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("dp_replicate", "dp_shard")) if len(shape) == 2 else None
    model, opt = training(world.device)
    step = ws.compile(train_step, strategy=strategy, mesh=mesh, backend="inductor", fullgraph=True)
    other, other_opt = eager(reference, world)
    faults, places = list[str](), list[int]()
    for call in range(CALLS):
        given = batch(call, world.rank, world.device)
        if not close(train_step(other, other_opt, *given), step(model, opt, *given)):
            faults.append(f"loss of call {call}")
        places = places or [held(param).data_ptr() for param in model.parameters()]
    for (name, param), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        if not close(whole(theirs), whole(param)):
            faults.append(name)
        faults += [
            f"{key} of {name}"
            for key, value in other_opt.state[theirs].items()
            if not close(whole(value), whole(opt.state[param][key]))
        ]
    return seen(step, model, faults, places)


def seen(step: ws.CompiledStep, model: nn.Module, faults: list[str], places: list[int]) -> Seen:
    told, program = step.explain(), step.program()
    if step.cache_info().traces != 1:
        faults.append(f"{step.cache_info().traces} traces")
    gathers: dict[str, int] = {}
    for one in told.collectives:
        if one.kind == "gather":
            gathers[one.phase] = gathers.get(one.phase, 0) + 1
    notes = [note for record in program.history for note in record.notes]
    return Seen(
        faults=faults,
        backend=told.backend,
        gathers=gathers,
        gather_operators={
            str(node.target) for node in program.graph.nodes if op_info.is_collective(node) and "gather" in node.name
        },
        copied=next(note for note in notes if "copied at the end" in note),
        moved=[
            name
            for (name, param), place in zip(model.named_parameters(), places, strict=True)
            if held(param).data_ptr() != place
        ],
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_gpus_train_as_eager_code_does_in_one_graph(name: str, nccl2: Any) -> None:
    strategy = STRATEGIES[name]
    for rank in nccl2.run(trained, strategy, strategy, (2,)):
        assert rank.faults == []
        assert rank.backend == "inductor, one CUDA graph"
        assert rank.moved == []
        assert rank.copied.startswith("0 B of inputs")
        if name.startswith("zero"):
            assert rank.gather_operators == {str(ALL_GATHER_INTO)}  # straight into the parameters
            assert sum(rank.gathers.values()) > 0
        else:
            assert rank.gathers["forward"] > 0
            assert ("backward" in rank.gathers) is (name == "fsdp_again")


@pytest.mark.parametrize("name", ["fsdp_keep", "fsdp_again"])
def test_fsdp_has_the_numbers_of_eager_ddp(name: str, nccl2: Any) -> None:
    for rank in nccl2.run(trained, STRATEGIES[name], ws.DDP(), (2,)):
        assert rank.faults == []


@pytest.mark.parametrize("name", STRATEGIES)
def test_four_gpus_on_a_mesh_of_two_axes(name: str, nccl4: Any) -> None:
    for rank in nccl4.run(trained, STRATEGIES[name], ws.DDP(), (2, 2)):
        assert rank.faults == []
        assert rank.backend == "inductor, one CUDA graph"


def notes_its_loss(losses: list[float], model: nn.Module, opt: Optimizer, x: Tensor, y: Tensor) -> None:
    losses.append(train_step(model, opt, x, y).item())


def looks_before_its_update(losses: list[float], model: nn.Module, opt: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = next_byte_loss(model, x, y)
    loss.backward()
    if math.isfinite(loss.item()):
        opt.step()
    opt.zero_grad()
    losses.append(loss.item())


LIVE = {one.__name__: one for one in (notes_its_loss, looks_before_its_update)}
PIECES = {"notes_its_loss": 1, "looks_before_its_update": 2}


def live(name: str, strategy: Strategy) -> tuple[list[str], tuple[int, int]]:
    """What differs from eager code, and the pieces and single calls of torch that ran in the last call."""
    world = ws.init()
    torch.cuda.set_device(world.device)
    step = ws.compile(LIVE[name], strategy=strategy, backend="inductor")
    ours, theirs = training(world.device), eager(strategy, world)
    came, wanted, counts = list[float](), list[float](), [(0, 0)]
    for call in range(CALLS):
        given = batch(call, world.rank, world.device)
        step(came, *ours, *given)
        LIVE[name](wanted, *theirs, *given)
        told = step.explain().live
        counts.append((told.launches, told.executed))
    pairs = zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True)
    faults = [key for (key, one), other in pairs if not close(whole(other), whole(one))]
    faults += [] if close(torch.tensor(wanted), torch.tensor(came)) else [f"losses: {came} for {wanted}"]
    return faults, (counts[-1][0] - counts[-2][0], counts[-1][1] - counts[-2][1])


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("strategy", ["zero1", "fsdp_keep", "fsdp_again"])
@pytest.mark.parametrize("name", LIVE)
def test_live_steps_run_in_pieces(name: str, strategy: str, nccl2: Any) -> None:
    """One graph between two values that Python asks for, once the way is known."""
    for faults, ran in nccl2.run(live, name, STRATEGIES[strategy]):
        assert faults == []
        assert ran == (PIECES[name], 0)
