"""Optimizers that go through their parameters in a loop, as kernels over all of them.

Where triton is, kernels run in its interpreter, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import wholestep as ws
import wholestep.api.stages
from tests.unit import builders
from tests.unit.builders import aten
from tests.unit.lower.foreach.test_multi_tensor import FORM, Listed, interpreted, on_the_cpu, segments
from wholestep.capture.capture import capture
from wholestep.cost.cost_model import CostModel
from wholestep.ir import node_meta, op_info
from wholestep.ir.node_meta import Region
from wholestep.ir.program import Program
from wholestep.lower.foreach import index_expr, multi_tensor
from wholestep.lower.foreach.kernel_plan import Plan, plan
from wholestep.lower.inductor import segment_compiler
from wholestep.lower.inductor_passes import form_inductor_segments
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.schedule.form_segments import form_segments
from wholestep.passes.schedule.pack_scalars import pack_scalars

__all__ = ["interpreted", "on_the_cpu"]  # fixtures

Update = Callable[[Tensor, Tensor, dict[str, Tensor], float], None]


class Looped(torch.optim.Optimizer):
    """A user's own optimizer: an update of a parameter, its gradient, its state and the rate, one after another."""

    def __init__(self, params: Iterable[Tensor], update: Update) -> None:
        super().__init__(params, {"lr": 0.05})
        self.update = update
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {"mean": torch.zeros_like(one), "square": torch.zeros_like(one)}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                self.update(one, one.grad, self.state[one], group["lr"])


def lion(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    weight.mul_(1 - rate * 0.1).add_(torch.lerp(grad, state["mean"], 0.9).sign_(), alpha=-rate)
    state["mean"].lerp_(grad, 0.01)


def cautious(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    """AdamW whose steps go where the gradient points, or nowhere."""
    state["mean"].lerp_(grad, 0.1)
    state["square"].mul_(0.99).addcmul_(grad, grad, value=0.01)
    move = state["mean"] / state["square"].sqrt().add_(1e-8)
    weight.sub_(torch.where(move * grad > 0, move, torch.zeros_like(move)) * rate)


def clamped(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    state["mean"].copy_((state["mean"] * 0.9 + grad**2).clamp(1e-4, 10.0))
    weight.copy_(weight - rate * grad * state["mean"].rsqrt())


def normed(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    state["mean"].lerp_(grad, 0.1)
    weight.sub_(state["mean"] / state["mean"].norm() * rate)


def counted(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    weight.sub_(grad * rate * (grad > 0).to(torch.int64))


def by_rows(weight: Tensor, grad: Tensor, state: dict[str, Tensor], rate: float) -> None:
    weight.sub_(grad * state["square"][:1] * rate)


POINTWISE = [lion, cautious, clamped]


def net(layers: int = 0) -> nn.Module:
    torch.manual_seed(0)
    between = [layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *between, nn.Linear(16, 5)).double()


def train_step(model: nn.Module, opt: Looped, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def program_of(update: Update, layers: int = 0) -> Program:
    model = net(layers)
    args = (model, Looped(model.parameters(), update), torch.ones(4, 6, dtype=torch.float64))
    return run_passes(builders.without_gradients(capture(train_step, args, {}).program), [eliminate_dead_code])


def updating(program: Program) -> list[Any]:
    """The segments of an optimizer."""
    return [one for one in segments(program) if node_meta.origin([*one.calls][-1]).region is Region.OPTIMIZER]


@pytest.mark.parametrize("update", POINTWISE, ids=lambda update: update.__name__)
def test_a_loop_trains_as_eager_code_does(update: Update, interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Listed()
    monkeypatch.setattr(wholestep.api.stages, "backend_for", lambda *chosen: backend)
    found = []
    for step in (ws.compile(train_step), train_step):
        model = net()
        opt = Looped(model.parameters(), update)
        losses = []
        for number in range(6):
            opt.param_groups[0]["lr"] = 0.05 / (1 + number)
            losses.append(step(model, opt, torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6) + number))
        states = [value for one in model.parameters() for value in opt.state[one].values()]
        found.append([*losses, *(one.detach() for one in model.parameters()), *states])
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)
    assert backend.num_segments == 1


@pytest.mark.parametrize("update", POINTWISE, ids=lambda update: update.__name__)
def test_a_loop_is_one_kernel_for_all_parameters(update: Update) -> None:
    program = run_passes(
        program_of(update),
        [*FORM, partial(reinplace, hold_updates=True), multi_tensor.MultiTensorCompiler().note_updates],
    )
    assert program.history[-1].notes == ("4 tensors are updated by 1 kernels over lists",)
    assert len(updating(program)) == 1


def test_a_loop_is_not_cut_where_it_repeats_itself() -> None:
    """As Inductor's segments are on a GPU, which it compiles once for all pieces: a kernel over lists is one anyway."""
    passes = [
        partial(pack_scalars, reads=segment_compiler.reads_packed), partial(form_inductor_segments("cuda"),
        compiles=segment_compiler.compiles), partial(reinplace, hold_updates=True),
    ]  # fmt: skip
    (segment,) = updating(run_passes(program_of(lion, layers=6), passes))
    assert isinstance(found := plan(segment, {}), Plan)
    assert [len(kernel.rows) for kernel in found.kernels] == [16]
    assert len(updating(run_passes(program_of(normed, layers=6), passes))) > 1


def test_a_loop_is_predicted_as_one_kernel() -> None:
    """Of a kernel for every parameter the least time of one would be counted as often, and hide what it does not."""
    program = program_of(lion, layers=6)
    cost = replace(CostModel.default("h200+nvlink"), compiles=segment_compiler.may_compile)

    def update_us(cost: CostModel) -> float:
        times_us = cost.times_us(list(program.graph.nodes))
        return sum(us for node, us in times_us.items() if node_meta.origin(node).region is Region.OPTIMIZER)

    assert 0 < update_us(replace(cost, at_once=multi_tensor.loops)) < update_us(cost) / 8


OTHERS = {normed: "norm", by_rows: "mul", counted: "to_copy"}


@pytest.mark.parametrize("update", OTHERS, ids=lambda update: update.__name__)
def test_what_is_not_element_by_element_is_left_to_inductor(update: Update) -> None:
    left = updating(run_passes(program_of(update), [*FORM, partial(reinplace, hold_updates=True)]))
    assert left
    for segment in left:
        found = plan(segment, {})
        assert isinstance(found, str)
        assert OTHERS[update] in found


@pytest.mark.parametrize("update", OTHERS, ids=lambda update: update.__name__)
def test_a_compiler_keeps_whole_what_has_other_calls_between_those_of_the_loop(update: Update) -> None:
    """Else a norm by turns with updates would be a segment for every parameter, and so would they."""
    program = program_of(update)
    assert not index_expr.apart(program.graph)
    pack = partial(pack_scalars, reads=segment_compiler.reads_packed)
    plain = run_passes(program, [pack, partial(form_segments, compiles=segment_compiler.compiles)])
    formed = run_passes(program, FORM)
    assert [len([*one.calls]) for one in segments(formed)] == [len([*one.calls]) for one in segments(plain)]


def test_only_what_an_optimizer_does_is_taken() -> None:
    program = program_of(lion)
    taken = index_expr.apart(program.graph)
    assert taken
    assert {node_meta.origin(node).region for node in taken} == {Region.OPTIMIZER}
    tanh = next(node for node in program.graph.nodes if op_info.is_op(node) and "tanh" in str(node.target))
    assert not index_expr.takes(tanh)


def product(other: str, *, counted: bool = False) -> fx.Node:
    """A weight on a GPU times a number on the device `other`, as an optimizer's call; a size may be data."""
    graph, shapes = fx.Graph(), ShapeEnv()
    weight, rate = graph.placeholder("weight"), graph.placeholder("rate")
    made = graph.call_function(aten.mul.Tensor, (weight, rate))
    with FakeTensorMode(shape_env=shapes):
        size = shapes.create_unbacked_symint() if counted else 3
        for node in (weight, made):
            node_meta.set_value(node, torch.empty(size, device="cuda"))
        node_meta.set_value(rate, torch.empty((), device=other))
    node_meta.set_origin(made, node_meta.Origin(Region.OPTIMIZER))
    return made


def test_what_lies_on_the_host_is_read_by_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that is a tensor of the CPU may stand beside a weight of a GPU."""
    monkeypatch.undo()
    assert index_expr.loops(product("cuda").graph)
    assert not index_expr.loops(product("cpu").graph)


def test_a_size_that_is_data_is_neither_asked_for_nor_taken() -> None:
    assert not index_expr.takes(product("cuda", counted=True))
