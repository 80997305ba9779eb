"""What compression remembers: random factors as PyTorch draws them, counting of calls, saving and loading."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.unit import builders
from tests.unit.builders import gradient
from wholestep.cost.cost_model import CostModel
from wholestep.ir.program import InputKind, Program
from wholestep.passes.comm.bucketing import bucket_gradients
from wholestep.passes.pass_manager import run_passes
from wholestep.runtime.compression_state import CompressionState

SHAPES = {"a": (16, 12), "b": (5,), "c": (10, 20)}
WARM = ws.PowerSGD(rank=2, start_iter=2, seed=5)
COLD = replace(WARM, warm_start=False)
COST = CostModel.default("cpu+gloo")


def reducing(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    return gradient(a * 2, "a"), gradient(b * 2, "b"), gradient(c * 2, "c")


def program(state: CompressionState, fn=reducing, bucket_bytes: int = 1) -> Program:
    tensors = [torch.zeros(shape) for shape in SHAPES.values()]
    placed = builders.place(builders.capture(fn, tensors, names=list(SHAPES), kinds=[InputKind.PARAM] * 3))
    return run_passes(placed, [partial(bucket_gradients, cost=COST, bucket_bytes=bucket_bytes), state.as_pass()])


def at_its_start(how: ws.PowerSGD) -> CompressionState:
    state = CompressionState(how)
    for _ in range(how.start_iter):
        assert not state.started
        with state.call(state.buffers_for(program(state))):
            pass
    assert state.started
    return state


def as_torch_draws(number: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The factors of the bucket that is the `number`-th to draw, with the generators that the hook uses."""
    generator = np.random.RandomState(5)
    seed = [generator.randint(1_000_000_000) for _ in range(number + 1)][number]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [torch.randn(1, *shape)[0] for shape in shapes]


def held_by_name(state: CompressionState, one: Program) -> dict[str, Tensor]:
    names = [record.name for record in one.inputs if record.kind is InputKind.COMM]
    return dict(zip(names, state.buffers_for(one).tensors, strict=True))


def test_new_memory_is_zeros_and_draws_per_bucket():
    state = at_its_start(WARM)
    found = held_by_name(state, program(state))
    assert all(not found[f"powersgd.error.{name}"].any() for name in SHAPES)
    assert torch.equal(found["powersgd.q.a"], as_torch_draws(0, (12, 2))[0])
    assert torch.equal(found["powersgd.q.c"], as_torch_draws(1, (20, 2))[0])


def test_factors_of_one_bucket_come_from_one_seed():
    state = at_its_start(WARM)
    found = held_by_name(state, program(state, bucket_bytes=1 << 20))
    expected = as_torch_draws(0, (12, 2), (20, 2))
    assert builders.same([found["powersgd.q.a"], found["powersgd.q.c"]], expected)


def test_another_program_finds_the_same_tensors():
    state = at_its_start(WARM)
    one = held_by_name(state, program(state))
    other = held_by_name(state, program(state, bucket_bytes=1 << 20))  # buckets are no part of the names
    assert all(one[name] is other[name] for name in one)
    assert state.state_dict()["draws"] == 2


def test_cold_factors_are_drawn_at_every_call_and_again_behind_a_failure():
    state = at_its_start(COLD)
    held = state.buffers_for(program(state))
    q_a, q_c = (one for one in held.tensors if one.shape[1:] == (2,))
    for call in range(3):
        before = copy.deepcopy(state.state_dict())
        with pytest.raises(RuntimeError, match="lost"), state.call(held):
            raise RuntimeError("lost")
        assert state.state_dict().keys() == before.keys()
        assert (state.state_dict()["calls"], state.state_dict()["draws"]) == (2 + call, 2 * call)
        with state.call(held):
            assert torch.equal(q_a, as_torch_draws(2 * call, (12, 2))[0])
            assert torch.equal(q_c, as_torch_draws(2 * call + 1, (20, 2))[0])
    assert not [name for name in state.state_dict()["tensors"] if ".q." in name]


def test_the_global_generator_is_left_alone():
    state, before = at_its_start(WARM), torch.get_rng_state()
    state.buffers_for(program(state))
    assert torch.equal(torch.get_rng_state(), before)


def test_calls_that_reduce_nothing_do_not_count():
    state = CompressionState(WARM)
    held = state.buffers_for(program(state, lambda a, b, c: a + 1))
    for _ in range(5):
        with state.call(held):
            pass
    assert state.state_dict()["calls"] == 0
    assert not state.started


def test_a_program_is_outdated_where_compression_starts_and_where_state_is_loaded():
    state = CompressionState(WARM)
    held = state.buffers_for(program(state))
    with state.call(held):
        pass
    assert not state.is_outdated(held)
    with state.call(held):
        pass
    assert state.is_outdated(held)
    held = state.buffers_for(program(state))
    assert not state.is_outdated(held)
    state.load_state_dict(state.state_dict())
    assert state.is_outdated(held)


def test_what_is_loaded_is_a_copy_and_draws_go_on():
    state = at_its_start(COLD)
    held = state.buffers_for(program(state))
    with state.call(held):
        held.tensors[0].fill_(3.0)
    other = CompressionState(COLD)
    other.load_state_dict(state.state_dict())
    held.tensors[0].fill_(7.0)
    again = other.buffers_for(program(other))
    assert (again.tensors[0] == 3.0).all()
    with other.call(again):
        found = [one for one in again.tensors if one.shape[1:] == (2,)]
        assert torch.equal(found[0], as_torch_draws(2, (12, 2))[0])


def test_state_of_another_model_is_refused():
    state = at_its_start(WARM)
    state.buffers_for(program(state))
    kept = state.state_dict()
    kept["tensors"]["powersgd.q.a"] = torch.zeros(12, 1)
    other = CompressionState(WARM)
    other.load_state_dict(kept)
    with pytest.raises(ws.ConfigError, match=r"powersgd.q.a is torch.float32\[12, 1\], the step needs"):
        other.buffers_for(program(other))


@pytest.mark.parametrize("bad", [{}, {"calls": 1, "draws": 0}, {"calls": 1, "draws": 0, "tensors": {"a": 1}}, None])
def test_what_is_no_state_is_refused(bad):
    with pytest.raises(ws.ConfigError, match="wants what state_dict of a step"):
        CompressionState(WARM).load_state_dict(bad)


def test_a_step_that_compresses_nothing_has_no_state():
    step = ws.compile(lambda x: x)
    assert step.state_dict() == {}
    step.load_state_dict({})
    with pytest.raises(ws.ConfigError, match="compresses nothing"):
        step.load_state_dict({"calls": 1})
