"""delay_host_reads: the host does not wait in the middle of a step for what only its results need. On fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.lower.gpu_programs import Spec, captured, gpu, host
from wholestep.ir.program import InputKind, Program
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.schedule.defer_host_reads import MOST_BYTES, defer_host_reads

ITEM, COPY = aten._local_scalar_dense.default, aten._to_copy.default
CPU = torch.device("cpu")


def program_of(fn: Callable[..., Any], *specs: Spec, writes: bool = False) -> Program:
    return builders.without_gradients(captured(fn, specs, writes=writes))


def order(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def delayed(program: Program) -> tuple[list[Any], list[Any], Program]:
    """The order of the calls before and after, and the program."""
    before = order(program)
    after = run_passes(program, [defer_host_reads])
    assert sorted(map(str, order(after))) == sorted(map(str, before))
    return before, order(after), after


def logs(x: Tensor) -> tuple[Any, ...]:
    loss = x.square().sum()
    number = loss.item()
    return x * 2, number, x.exp()


def test_a_number_that_is_only_returned_is_read_at_the_end():
    before, after, program = delayed(program_of(logs, gpu(3)))
    assert before[-1] is not ITEM
    assert after[-1] is ITEM
    assert [one for one in after if one is not ITEM] == [one for one in before if one is not ITEM]
    assert program.history[-1].notes == ("1 values go to the host at the end of the step",)


def test_what_the_host_makes_of_it_goes_along():
    def step(x: Tensor) -> tuple[Any, ...]:
        copy = aten._to_copy.default(x.sum(), device=CPU)
        return copy.view(1) * 2, x.exp() * x.cos()

    _, after, _ = delayed(program_of(step, gpu(3)))
    assert after[-3:] == [COPY, aten.view.default, aten.mul.Tensor]


def test_a_step_that_reads_at_the_end_is_left_alone():
    program = program_of(lambda x: (x.exp(), x.sum().item()), gpu(3))
    assert defer_host_reads(program) is program


def used(x: Tensor) -> tuple[Any, ...]:
    number = x.sum().item()
    return torch.full((3,), number, device="cuda") * x, x.exp()


def random(x: Tensor) -> tuple[Any, ...]:
    return torch.bernoulli(aten._to_copy.default(x, device=CPU)), x.exp()


def large(x: Tensor) -> tuple[Any, ...]:
    return aten._to_copy.default(x, device=CPU), x.exp()


STAYING = {
    "a number that the GPU takes": (used, gpu(3)),
    "a draw on the host": (random, gpu(3)),
    "a large tensor": (large, gpu(MOST_BYTES // 4 + 1)),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_cannot_wait_stays(name):
    fn, spec = STAYING[name]
    before, after, _ = delayed(program_of(fn, spec))
    assert after == before


def test_a_tensor_that_is_just_small_enough():
    before, after, _ = delayed(program_of(large, gpu(MOST_BYTES // 4)))
    assert after != before


def test_what_the_step_writes_to_is_read_before():
    """The value that the parameter had when it was read, and nothing is copied for it."""

    def step(w: Tensor, x: Tensor) -> tuple[Any, ...]:
        old = aten._to_copy.default(w.view(-1), device=CPU)
        w.add_(x)
        return old, x.exp()

    program = program_of(step, gpu(3, kind=InputKind.PARAM), gpu(3), writes=True)
    before, after, _ = delayed(program)
    assert after == before


def test_reads_of_the_host_alone_are_not_counted():
    program = program_of(lambda x, rate: (rate.item(), x.exp()), gpu(3), host())
    assert defer_host_reads(program) is program


def test_scheduled_programs_keep_their_order():
    program = run_passes(program_of(logs, gpu(3)), [reinplace])
    assert defer_host_reads(program) is program
