"""The generator's state is part of the graph: reads and sets happen at every call, in their place."""

from __future__ import annotations

import torch
from torch import Tensor

import wholestep as ws
from tests.unit.capture.steps import calls, program_of
from wholestep.capture.reach.rng_and_iterators import traced_generator
from wholestep.ir import op_info
from wholestep.ir.program import Program


def twice_the_same(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.get_rng_state()
    first = torch.rand_like(x)
    torch.set_rng_state(state)
    again = torch.rand_like(x)
    return first, again, torch.rand_like(x)


def through_the_module(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        inner = torch.rand_like(x)
    return inner + torch.rand_like(x)


def random_nodes(program: Program) -> list[str]:
    return [str(node.target).split(".")[1] for node in calls(program) if op_info.is_random(node.target)]


def test_reads_and_sets_are_nodes_in_order() -> None:
    program = program_of(twice_the_same, torch.ones(3))
    assert random_nodes(program) == ["rng_get", "rand_like", "rng_set", "rand_like", "rand_like"]


def test_the_schedule_keeps_their_order() -> None:
    step = ws.compile(twice_the_same)
    step(torch.ones(3))
    assert random_nodes(step.program()) == ["rng_get", "rand_like", "rng_set", "rand_like", "rand_like"]


def test_every_call_draws_as_eager_code_would() -> None:
    for step in (twice_the_same, through_the_module):
        compiled, x = ws.compile(step), torch.ones(4)
        drawn = []
        for call in range(3):
            torch.manual_seed(call)
            want, after = step(x), torch.get_rng_state()
            torch.manual_seed(call)
            came = compiled(x)
            assert torch.equal(torch.cat([*map(torch.atleast_1d, want)]), torch.cat([*map(torch.atleast_1d, came)]))
            assert torch.equal(torch.get_rng_state(), after)
            drawn.append(came[0])
        assert not torch.equal(drawn[0], drawn[1])
        assert compiled.cache_info().traces == 1


def test_capture_draws_nothing_from_the_real_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    program_of(twice_the_same, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_functions_of_torch_are_put_back() -> None:
    functions = (torch.get_rng_state, torch.random.set_rng_state, torch.cuda.get_rng_state)
    with traced_generator():
        assert torch.get_rng_state is not functions[0]
    assert functions == (torch.get_rng_state, torch.random.set_rng_state, torch.cuda.get_rng_state)
