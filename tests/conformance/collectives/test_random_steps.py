"""200 random steps with 1 to 6 collectives each: compiled equals eager, bit for bit, on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wholestep as ws
from tests.fuzz import random_collectives
from tests.harness.training import backward_and_step
from wholestep.ir import op_info
from wholestep.ir.program import Stage

STEPS, CHUNK, CALLS = 100, 20, 3


def groups() -> random_collectives.Groups:
    """Groups of this rank; every rank makes all of them, as torch.distributed asks."""
    alone = [dist.new_group([rank]) for rank in range(random_collectives.SIZE)]
    pair = dist.new_group(list(range(random_collectives.SIZE)))
    return {"default": None, "world": dist.group.WORLD, "pair": pair, "alone": alone[dist.get_rank()]}


def inputs(number: int, call: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * number + 10 * call + dist.get_rank())
    return tuple(
        torch.randn(random_collectives.ROWS, random_collectives.COLUMNS, generator=generator) for _ in range(2)
    )  # type: ignore[return-value]


def step_of(number: int, groups_of_rank: random_collectives.Groups) -> Any:
    """The step of that number; each second one also trains a model, whose gradients the strategy reduces."""
    lines = random_collectives.draw(number)

    def plain(first: Tensor, second: Tensor) -> list[Tensor]:
        return random_collectives.run(lines, groups_of_rank, first, second)

    def training(model: nn.Module, opt: torch.optim.Optimizer, first: Tensor, second: Tensor) -> list[Tensor]:
        out = model(first)
        values = random_collectives.run(lines, groups_of_rank, out.detach() + first, second)
        loss = (out * values[-1].detach()).square().mean()
        backward_and_step(loss, opt)
        return [*values, loss.detach()]

    return training if number % 2 else plain


def run_both(number: int, groups_of_rank: random_collectives.Groups) -> str | None:
    """What differs between eager and compiled calls of one step; None if nothing does."""
    torch.manual_seed(number)
    models = [nn.Linear(random_collectives.COLUMNS, random_collectives.COLUMNS)]
    models.append(copy.deepcopy(models[0]))
    opts = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    eager = step_of(number, groups_of_rank)
    compiled = ws.compile(step_of(number, groups_of_rank), fullgraph=True)
    training = number % 2
    wrapped = DistributedDataParallel(models[0]) if training else None
    for call in range(CALLS):
        here, there = inputs(number, call), inputs(number, call)
        wanted = eager(*((wrapped, opts[0]) if training else ()), *here)
        found = compiled(*((models[1], opts[1]) if training else ()), *there)
        pairs = [*zip(wanted, found, strict=True), *zip(here, there, strict=True)]
        pairs += zip(models[0].parameters(), models[1].parameters(), strict=True)
        for position, (a, b) in enumerate(pairs):
            if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.nan_to_num(), b.nan_to_num()):
                text = "\n  ".join(map(str, random_collectives.draw(number)))
                return f"step {number}, call {call}, value {position} differs by {(a - b).abs().max()}:\n  {text}"
    nodes = compiled.program(Stage.CAPTURED).module.graph.nodes
    found, drawn = (
        sum(map(op_info.is_collective, nodes)),
        sum(map(random_collectives.communicates, random_collectives.draw(number))),
    )
    if compiled.cache_info().traces != 1 or found != drawn:
        return f"step {number}: {compiled.cache_info().traces} traces, {found} collectives in the graph, {drawn} drawn"
    return None


def run_chunk(first: int) -> list[str]:
    groups_of_rank = groups()
    return [text for number in range(first, first + CHUNK) if (text := run_both(number, groups_of_rank))]


@pytest.mark.row("S6", "fuzz")
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("first", range(0, STEPS, CHUNK))
def test_random_steps_equal_eager(pool2: Any, first: int) -> None:
    for rank, differences in enumerate(pool2.run(run_chunk, first)):
        assert not differences, f"rank {rank}:\n" + "\n".join(differences)


def test_the_steps_are_varied() -> None:
    """All collectives, both ways of calling them and all groups are drawn, and as many as the suite promises."""
    steps = [random_collectives.draw(number) for number in range(STEPS)]
    lines = [line for step in steps for line in step]
    counts = [sum(map(random_collectives.communicates, step)) for step in steps]
    assert {line.name for line in lines} == {*random_collectives.COLLECTIVES, *random_collectives.COMPUTE, "wait"}
    assert {line.group for line in lines} == {"default", "world", "pair", "alone"}
    assert set(counts) == {1, 2, 3, 4, 5, 6}
    waits = sum(line.name == "wait" for line in lines)
    assert waits == sum(line.is_async for line in lines) > STEPS / 2
