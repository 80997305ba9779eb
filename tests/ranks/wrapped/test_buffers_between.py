"""What forwards of a wrapper do to buffers between compiled calls reaches those as it reaches eager ones."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import update_bn

import wholestep as ws

Model = DistributedDataParallel


def evaluate(model: Model, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(x)


def evaluate_with_graph(model: Model, x: Tensor) -> Tensor:
    """A forward that a reduction could follow, as torch sees it."""
    model.eval()
    return model(x).detach()


def finetune(model: Model, x: Tensor) -> Tensor:
    """A training with frozen statistics."""
    loss = model(x).square().mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param.sub_(param.grad, alpha=0.05)  # type: ignore[arg-type]
    model.zero_grad()
    return loss.detach()


def eager_training(model: Model, x: Tensor) -> None:
    model.train()
    cross_entropy(model(x), torch.zeros(len(x), dtype=torch.int64)).backward()
    model.zero_grad()


def eager_evaluation(model: Model, x: Tensor) -> None:
    evaluate(model, x)


def new_statistics(model: Model, x: Tensor) -> None:
    update_bn([x, 2 * x, x + 1], model)


STEPS = {one.__name__: one for one in (evaluate, evaluate_with_graph, finetune)}
BETWEEN = {
    "training": (eager_training,),
    "evaluation, then training": (eager_evaluation, eager_training),
    "training, then evaluation": (eager_training, eager_evaluation),
    "new statistics": (new_statistics,),
    "new statistics, then training": (new_statistics, eager_training),
}


def both(step: str, between: str) -> bool:
    """Whether the ranks ever had other statistics when a call began."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    models = [DistributedDataParallel(one) for one in (deepcopy(eager), eager)]
    compiled = ws.compile(STEPS[step], backend="eager", fullgraph=True)
    differed = False
    for call in range(8):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * call + dist.get_rank())) + dist.get_rank()
        results = []
        for model, run in zip(models, (compiled, STEPS[step]), strict=True):
            if call % 3 != 2:
                for one in BETWEEN[between]:
                    one(model, x)
            model.train()
            model.module[1].eval()
            means = [torch.empty(6) for _ in range(2)]
            dist.all_gather(means, model.module[1].running_mean)
            differed |= not torch.equal(*means)
            results.append(run(model, x))
        mine, theirs = ([*model.module.state_dict().values()] for model in models)
        assert torch.equal(*results), (call, results)
        assert all(map(torch.equal, mine, theirs)), call
    return differed


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("step", STEPS)
def test_statistics_are_those_of_eager_ranks(pool2: Any, step: str, between: str) -> None:
    differed = [True, True] if between != "training, then evaluation" else [False, False]
    assert pool2.run(both, step, between) == differed


def constant(calls: int) -> int:
    """How often buffers are broadcast in so many calls between which nothing writes them."""
    from wholestep.runtime import buffer_sync

    sent, broadcast = [], buffer_sync.broadcast_over
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)))
    step = ws.compile(evaluate_with_graph, backend="eager", fullgraph=True)
    buffer_sync.broadcast_over = lambda *args: sent.append(args) or broadcast(*args)  # type: ignore[func-returns-value]
    try:
        for _ in range(calls):
            step(model, torch.ones(5, 4))
    finally:
        buffer_sync.broadcast_over = broadcast
    return len(sent)


def test_constants_travel_once(pool2: Any) -> None:
    assert pool2.run(constant, 6) == [1, 1]
