"""The cases of tests/behaviour on two ranks with different data, against eager DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.behaviour.cases import OPTIM_CASES, STEP_CASES
from tests.behaviour.harness import Compiled, EagerDDP, check
from tests.behaviour.small_models import class_batches, loss_of, mlp
from tests.harness.training import backward_and_step
from wholestep.config import Strategy

CASES = {**STEP_CASES, **OPTIM_CASES}
STRATEGIES: dict[str, Strategy] = {
    "ddp": ws.DDP(),
    "fsdp_keep": ws.FSDP(reshard_after_forward=False),
    "fsdp_again": ws.FSDP(reshard_after_forward=True),
    "zero1": ws.ZeRO(),
    "zero2": ws.ZeRO(stage=2),
}
IN_TURN = ("ddp", "fsdp_keep", "ddp", "fsdp_again", "ddp", "zero1", "ddp", "zero2")
UNDER_ALL = (
    "gradients_never_zeroed", "zero_grad_to_zeros_at_start", "clip_norm", "batch_norm", "tied_weights",
    "thawed_in_the_step",
)  # fmt: skip
"""Cases that go another way under each strategy."""
REPLICATED = ("gradient_edited_by_hand",)
"""Cases in which each rank adds random numbers of its own to reduced gradients: under DistributedDataParallel the
parameters drift apart, and sharded ones cannot."""

pytestmark = pytest.mark.ranks


def chosen() -> list[tuple[str, str]]:
    """Each optimizer and every second step under one strategy, and some under all of them.

    What the other steps show of Python they show on one process (`tests/behaviour/test_steps.py`).
    """
    names = [name for name, case in STEP_CASES.items() if case.ranks][::2]
    names += [name for name, case in OPTIM_CASES.items() if case.ranks]
    names += [name for name in (*UNDER_ALL, *REPLICATED) if name not in names]
    found = []
    for place, name in enumerate(names):
        in_turn = ("ddp",) if name in REPLICATED else (IN_TURN[place % len(IN_TURN)],)
        found += [(name, strategy) for strategy in (STRATEGIES if name in UNDER_ALL else in_turn)]
    return found


def complaints(name: str, strategy: str) -> list[str]:
    """Runs on every rank. An error of wholestep is told in words, so that the ranks stay usable."""
    try:
        return check(CASES[name], EagerDDP(), STRATEGIES[strategy])
    except ws.WholestepError as error:
        return [f"{type(error).__name__}: {error}"]


@pytest.mark.parametrize(("name", "strategy"), chosen())
def test_equals_eager_ddp(pool2: Any, name: str, strategy: str) -> None:
    found = pool2.run(complaints, name, strategy)
    told = [f"rank {rank}: {one}" for rank, ones in enumerate(found) for one in ones]
    assert not told, "\n".join(told)


def train_in_backward(inside: bool) -> list[Tensor]:
    """The parameters after three steps of one optimizer per parameter, stepped inside of the backward or after it."""
    module = mlp()
    opts = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in module.parameters()}

    def update(param: Tensor) -> None:
        opts[param].step()
        opts[param].zero_grad()

    if inside:
        for param in opts:
            param.register_post_accumulate_grad_hook(update)

    @ws.compile(strategy=ws.DDP(), backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        loss.backward()
        if not inside:
            for param in opts:
                update(param)
        return loss

    for batch in class_batches(Compiled()):  # type: ignore[arg-type]
        step(*batch)
    return [param.detach() for param in module.parameters()]


def test_an_optimizer_inside_of_the_backward_sees_reduced_gradients(pool2: Any) -> None:
    """DistributedDataParallel is no reference here: it reduces after the hooks, and ranks drift apart."""
    inside, after = pool2.run(train_in_backward, True), pool2.run(train_in_backward, False)
    for tensors in zip(*inside, *after, strict=True):
        assert all(torch.equal(tensors[0], other) for other in tensors[1:])


def numbers_that_move_on_one_rank(compiled: bool) -> list[Tensor]:
    """Losses and parameters of six steps. On rank 1 the number changes later than on rank 0, the name at every call."""
    run = Compiled() if compiled else EagerDDP()
    module = mlp()
    model, opt, rank = run.model(module), torch.optim.SGD(module.parameters(), lr=0.1), torch.distributed.get_rank()

    @run.compile
    def step(x: Tensor, y: Tensor, count: int, name: str) -> Tensor:
        return backward_and_step(loss_of(model, x, y) / count, opt).detach()

    found = []
    for number, batch in enumerate(class_batches(run, 6)):
        found.append(step(*batch, 3 + (number // 3 if rank else number), f"batch {number * rank}"))
    if compiled:
        assert run.steps[0].cache_info().traces == (3 if rank else 2)
    return [*found, *(param.detach() for param in module.parameters())]


def test_a_number_that_moves_on_one_rank_alone_needs_no_meeting(pool2: Any) -> None:
    wanted, found = (pool2.run(numbers_that_move_on_one_rank, compiled) for compiled in (False, True))
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(map(torch.equal, ours, theirs))
