"""Modules of ``parallelize_module`` in a compiled step: they run, as eager code, and the step says so."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import wholestep as ws

pytestmark = pytest.mark.ranks


def train(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def parallel(net: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def as_eager_code() -> tuple[str, list[str]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    eager, ours, compiled = parallel(net), parallel(net), ws.compile(train)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wholestep").addHandler(handler)
    try:
        for _ in range(3):
            x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
            assert torch.equal(train(*eager, x, y), compiled(*ours, x, y))
    finally:
        logging.getLogger("wholestep").removeHandler(handler)
    for one, other in zip(eager[0].parameters(), ours[0].parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(other, DTensor)
        assert torch.equal(one.to_local(), other.to_local())
    with pytest.raises(ws.ConfigError, match="Leave strategy out: such a model communicates itself"):
        ws.compile(train, strategy=ws.DDP())(*ours, x, y)
    with pytest.raises(ws.CaptureError, match="4 parameters such as"):
        ws.compile(train, fullgraph=True)(*ours, x, y)
    return str(compiled.explain()), said


def test_tensor_parallel_modules_run_as_eager_code_and_it_is_told(pool2: Any) -> None:
    for explained, said in pool2.run(as_eager_code):
        assert "DTensors of parallelize_module" in " ".join(explained.split())
        assert any(line.startswith("train is not compiled") for line in said)
