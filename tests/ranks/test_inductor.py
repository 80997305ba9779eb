"""The Inductor backend on two ranks: the same training as eager DDP, compiled once."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.unit.lower.test_inductor import TOLERANCE, train, train_step


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
