"""The Inductor backend on two ranks: the same training as eager DDP, compiled once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.unit.lower.test_inductor import TOLERANCE, train, train_step
from wholestep.cost.model import CostModel
from wholestep.lower import inductor
from wholestep.program.segment import Segment


def _train() -> tuple[torch.Tensor, str, dict[str, int]]:
    world = ws.init()
    step = ws.compile(train_step, backend="inductor", strategy=ws.DDP(bucket_bytes=800))
    losses, model, _ = train(step, rank=world.rank)
    wanted, eager, _ = train(train_step, rank=world.rank, wrap=DistributedDataParallel)
    torch.testing.assert_close(losses, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)
    return losses, step.plan, dict(counters["inductor"])


def test_two_ranks_train_as_eager_ddp_does_and_one_compiles(pool2: Any) -> None:
    (first, plan, made), (second, _, found) = pool2.run(_train, timeout_s=240.0)
    assert not torch.equal(first, second)  # each on its own batch
    assert plan.count("all_reduce") == 2
    assert made["fxgraph_cache_miss"] > 0
    assert "fxgraph_cache_miss" not in found
    assert found["fxgraph_cache_hit"] == made["fxgraph_cache_miss"] + made.get("fxgraph_cache_hit", 0)


def _one_cannot_compile() -> tuple[str, int]:
    world = ws.init()
    costs = replace(CostModel.default("cpu+gloo"), source="calibrated on this host")
    no_compiler = "there is no C++ compiler" if world.rank == 1 else ""
    with (
        patch("wholestep.step.agreed_costs", lambda *_: costs),
        patch.object(inductor, "why_not", lambda _: no_compiler),
    ):
        step = ws.compile(train_step, strategy=ws.DDP())
        step(*small())
        backend = step.explain().backend
    return backend, sum(isinstance(node.target, Segment) for node in step.graph.graph.nodes)


def small() -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    return model, torch.optim.AdamW(model.parameters()), torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)


def test_no_rank_compiles_where_one_cannot(pool2: Any) -> None:
    told = "eager (auto: rank 1: there is no C++ compiler)"
    assert pool2.run(_one_cannot_compile) == [(told, 0)] * 2
