"""What lies between steps: an evaluation, a checkpoint, a step that fails. The same bits wherever gathers stand.

ZeRO gathers at the end of a step what it has updated. FSDP gathers at the beginning of the next one, under its forward
(decision 125), and gathers none, some or all of it again for the backward.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import wholestep as ws
from wholestep.api import reshard_choice
from wholestep.cli.suite.workloads import draw_tokens
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build
from wholestep.config import Strategy
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import BucketKind, Region
from wholestep.ir.program import Program

pytestmark = pytest.mark.ranks

SIZE = LanguageModelSize(num_layers=3, width=32, num_heads=2, vocabulary=64, length=8, rows=2)
CALLS, EVALUATED, SAVED, FAILING, LOADED = 10, 2, 4, 6, 7
STRATEGIES: dict[str, Strategy] = {
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
    "fsdp_keep": ws.FSDP(reshard_after_forward=False),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
    "fsdp_some_again": ws.FSDP(),
}


def train_step(model: Any, opt: Optimizer, x: Tensor, y: Tensor, fails: bool) -> Tensor:
    loss: Tensor = model(x, y)
    loss.backward()
    if fails:
        raise RuntimeError("a batch that nobody can read")
    opt.step()
    opt.zero_grad()
    return loss.detach()


def trained(name: str, path: str) -> tuple[list[Tensor], Program | None]:
    """Losses and, after them, parameters; the program of a compiled step. Without a name: eager DDP."""
    torch.manual_seed(0)
    model = build(SIZE, torch.device("cpu"))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: nn.Module = model if name else DistributedDataParallel(model)
    step: Any = train_step
    if name:
        step = ws.compile(train_step, strategy=STRATEGIES[name], backend="eager", fullgraph=True)
    seen = []
    for call in range(CALLS):
        x, y = draw_tokens(SIZE, 10 * call + dist.get_rank())
        if call == EVALUATED:
            with torch.no_grad():
                seen.append(model(x, y))
        if call == SAVED:
            ws.save_checkpoint(path, model, opt)
        if call == FAILING:
            with pytest.raises((RuntimeError, ws.CaptureError), match="nobody can read"):
                step(given, opt, x, y, True)
            opt.zero_grad()
        if call == LOADED:
            ws.load_checkpoint(path, model, opt)
        seen.append(step(given, opt, x, y, False))
    seen += [one.full_tensor() if isinstance(one, DTensor) else one for one in model.parameters()]
    return [one.detach() for one in seen], step.program() if name else None


def places(program: Program) -> tuple[set[str], int]:
    """Parts of the step in which parameters are gathered, but for the backward, and how many the backward gathers."""
    gathers = {node: record for node in program.graph.nodes if (record := node_meta.bucket(node)) is not None
               and record.kind is BucketKind.GATHER and op_info.is_collective(node)}  # fmt: skip
    region, found = Region.FORWARD.value, set()
    for node in program.graph.nodes:
        if node in gathers and gathers[node].phase != Region.BACKWARD.value:
            found.add(region)
        elif node.op == "call_function" and node_meta.bucket(node) is None and not op_info.is_collective(node):
            region = node_meta.origin(node).region.value
    return found, sum(len(record.members) for record in gathers.values() if record.phase == Region.BACKWARD.value)


def beside_eager_ddp(name: str, limit_bytes: int | None) -> tuple[bool, set[str], int]:
    """Whether all is equal bit by bit, and `places` of the program."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    with patch.object(reshard_choice, "device_bytes", lambda device: limit_bytes):
        mine, program = trained(name, str(Path(path[0]) / "mine"))
    theirs, _ = trained("", str(Path(path[0]) / "theirs"))
    dist.barrier()
    shutil.rmtree(path[0], ignore_errors=True)
    assert program is not None
    equal = len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))
    return equal, *places(program)


DEVICE_BYTES = 460_000
"""80 % of it are more than what lives if all is gathered again, and less than what does if nothing is."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_equals_eager_ddp(pool2: Any, name: str) -> None:
    for equal, gathered, num_again in pool2.run(beside_eager_ddp, name, DEVICE_BYTES):
        assert equal
        assert gathered == ({"optimizer"} if name.startswith("zero") else {"forward"})
        assert (num_again > 0) == name.endswith("again")
        if name == "fsdp_some_again":
            assert num_again < pool2.run(beside_eager_ddp, "fsdp_again", None)[0][2]
