"""Steps that are live, whose Python reads values, under sharded strategies: as under eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from wholestep.config import Strategy

pytestmark = pytest.mark.ranks

STRATEGIES: dict[str, Strategy] = {
    "keep": ws.FSDP(reshard_after_forward=False),
    "again": ws.FSDP(reshard_after_forward=True),
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
}
TOLERANCE = 2**5 * torch.finfo(torch.float32).eps


class Scaled(nn.Module):
    """Layers of an odd width, and one parameter without dims, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x) * self.scale
        return out


def things() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Scaled()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: Any, opt: Any, x: Tensor, y: Tensor, read: list[float] | None) -> Tensor:
    """One step; with a list it reads its loss and the norm of the gradients."""
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    if read is not None:
        read += [float(loss), float(norm)]
    return loss.detach()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def beside_ddp(strategy: str, first_live: int, *, two_axes: bool = False) -> tuple[list[str], str]:
    """Five calls, live from one of them on; what differs from eager code, and the explanation."""
    model, opt = things()
    reference, reference_opt = things()
    wrapped = DistributedDataParallel(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if two_axes else None
    step = ws.compile(train, strategy=STRATEGIES[strategy], mesh=mesh, backend="eager")
    faults = []
    for call in range(5):
        torch.manual_seed(10 * call + dist.get_rank())
        batch = torch.randn(6, 4), torch.randn(6, 3)
        ours, theirs = ([], []) if call >= first_live else (None, None)
        loss = step(model, opt, *batch, ours)
        wanted = train(wrapped, reference_opt, *batch, theirs)
        read = zip([float(loss), *(ours or ())], [float(wanted), *(theirs or ())], strict=True)
        if any(abs(one - other) > TOLERANCE * max(1.0, abs(other)) for one, other in read):
            faults.append(f"numbers of call {call}: {ours}, {theirs}")
    for (name, want), came in zip(reference.named_parameters(), model.parameters(), strict=True):
        if not torch.allclose(want, whole(came), rtol=TOLERANCE, atol=TOLERANCE):
            faults.append(name)
    return faults, str(step.explain())


@pytest.mark.parametrize("first_live", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_reads_values_is_not_refused(pool2: Any, strategy: str, first_live: int) -> None:
    """With state that two compiled calls have sharded, or with none yet."""
    for faults, explanation in pool2.run(beside_ddp, strategy, first_live):
        assert faults == []
        note = "ZeRO keeps optimizer state whole" if "zero" in strategy else "What is no piece runs as eager code"
        assert note in " ".join(explanation.split())


def on_two_axes(strategy: str, first_live: int) -> tuple[list[str], str]:
    return beside_ddp(strategy, first_live, two_axes=True)


@pytest.mark.parametrize(("strategy", "first_live"), [("keep", 0), ("zero1", 0), ("again", 2), ("zero2", 2)])
def test_a_step_on_a_mesh_of_two_axes_is_not_refused(pool4: Any, strategy: str, first_live: int) -> None:
    """All ranks meet, and gradients of whole parameters are reduced over both axes."""
    for faults, explanation in pool4.run(on_two_axes, strategy, first_live):
        assert faults == []
        said = " ".join(explanation.split())
        assert ("the step runs as eager code" in said) == ("zero" in strategy)


def one_of_four_skips() -> str:
    model, opt = things()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    step = ws.compile(skipping, strategy=ws.FSDP(), mesh=mesh, backend="eager")
    try:
        step(model, opt, torch.randn(6, 4) + 100 * (dist.get_rank() == 2), torch.randn(6, 3))
    except ws.RankMismatchError as error:
        return str(error)
    return ""


def test_ranks_of_a_mesh_are_named_by_their_numbers(pool4: Any) -> None:
    for text in pool4.run(one_of_four_skips):
        assert "rank 2 ends its call" in text
        assert text.count("runs a forward") == 3


def one_rank_skips() -> str:
    model, opt = things()
    step = ws.compile(skipping, strategy=ws.FSDP(), backend="eager")
    try:
        step(model, opt, torch.randn(6, 4) + 100 * dist.get_rank(), torch.randn(6, 3))
    except ws.RankMismatchError as error:
        return str(error)
    return ""


def skipping(model: Any, opt: Any, x: Tensor, y: Tensor) -> None:
    if x.mean().item() < 50:
        nn.functional.mse_loss(model(x), y).backward()
        opt.step()


def test_ranks_that_part_are_an_error_on_both(pool2: Any) -> None:
    """Before the backward. The forward of the one that goes on gathers with nobody, so it must not be reached."""
    for text in pool2.run(one_rank_skips):
        assert "do not run the same" in text
