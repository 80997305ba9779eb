"""pack_scalars: numbers of the host travel once, before everything, and change no bit as they move."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from tests.unit import builders
from tests.unit.builders import aten, c10d
from tests.unit.capture.steps import captured
from wholestep.capture.bind.captured import Captured
from wholestep.ir import node_meta, op_info, printer
from wholestep.ir.ops.packed_scalars import element, pack
from wholestep.ir.program import Program
from wholestep.lower.inductor import segment_compiler
from wholestep.passes.memory.reinplace import reinplace
from wholestep.passes.pass_manager import run_passes
from wholestep.passes.rewrites.dead_code import eliminate_dead_code
from wholestep.passes.schedule.pack_scalars import is_number, known_at_start, pack_scalars

PACK = partial(pack_scalars, reads=segment_compiler.reads_packed)


def packs(program: Program) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=pack)


def elements(program: Program) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=element)


def without_communication(program: Program) -> Program:
    return run_passes(builders.without_gradients(program), [eliminate_dead_code])


def packed(fn: Callable[..., Any], tensors: list[Tensor]) -> tuple[Program, Program]:
    """A program before the pass and after it; the bits of both are the same."""
    before = without_communication(builders.capture(fn, tensors))
    after = run_passes(before, [PACK])
    assert builders.same(builders.execute(after, tensors), builders.execute(before, tensors))
    return before, after


class Net(nn.Module):
    """Parameters of two shapes and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


Optimizer = torch.optim.Optimizer
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw, one by one": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=False),
    "adam with amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True, foreach=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1, foreach=True),
    "nadam, one by one": lambda params: torch.optim.NAdam(params, lr=0.1, foreach=False),
    "a rate that is a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=True),
    "momentum, one by one": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
}


def moved(opt: Optimizer, call: int) -> None:
    """Another rate, decay and momentum for every call."""
    for group in opt.param_groups:
        rate = 0.1 / (call + 2)
        group["lr"].fill_(rate) if isinstance(group["lr"], Tensor) else group.update(lr=rate)
        group["weight_decay"] = 0.01 * (call + 1)
        if "betas" in group:
            group["betas"] = (0.8 + 0.01 * call, 0.99)
        elif "momentum" in group:
            group["momentum"] = 0.8 + 0.01 * call


def training(make: Callable[[Any], Optimizer]) -> tuple[Optimizer, Callable[[Tensor], Tensor], Captured, list[Tensor]]:
    torch.manual_seed(0)
    model = Net()
    opt = make(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    batch = [torch.randn(4, 3)]
    step(*batch)  # the state of the optimizer is there
    moved(opt, 0)
    return opt, step, captured(step, *batch), batch


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moving_numbers_of_an_optimizer_travel_once_and_change_no_bit(name):
    opt, step, found, batch = training(OPTIMIZERS[name])
    before = without_communication(found.program)
    after = run_passes(before, [PACK])
    (node,) = packs(after)
    assert_in_front(after, node)
    numbers = list(node.args[0])
    assert len(set(numbers)) == len(numbers) == node_meta.tensor(node).numel() > 0
    assert {read.args for read in elements(after)} == {(node, place) for place in range(len(numbers))}
    calls = {user for read in elements(after) for user in read.users}
    note = f"{len(numbers)} numbers of the host travel packed, for {len(calls)} calls"
    assert after.history[-1].notes == (note,)
    scheduled = run_passes(after, [reinplace])
    values = []
    for call in range(3):
        moved(opt, call)
        inputs = [*found.binding.fill(batch)]
        wanted = builders.execute(before, inputs)
        assert builders.same(builders.execute(after, inputs), wanted)
        assert builders.same(builders.execute(scheduled, inputs), wanted)
        values.append([value for value in inputs if isinstance(value, float)])
        step(*batch)
    assert values[0] != values[1] != values[2]


def assert_in_front(program: Program, packed: fx.Node) -> None:
    """Nothing but arithmetic of the host runs before the numbers are on their way."""
    early = known_at_start(program.graph)
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    assert all(node in early for node in calls[: calls.index(packed)])


def test_betas_of_one_cycle_travel():
    """OneCycleLR moves the first beta and the rate at every call."""
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=10)

    def step(x: Tensor) -> None:
        model(x).backward()
        opt.step()
        opt.zero_grad()

    batch = [torch.randn(4, 3)]
    step(*batch)
    schedule.step()
    found = captured(step, *batch)
    before = without_communication(found.program)
    after = run_passes(before, [PACK])
    (node,) = packs(after)
    names = dict(zip(after.placeholders, (record.name for record in after.inputs), strict=True))
    reads = {names[one] for one in _sources(node)}
    assert len(elements(after)) > 2
    assert {"opt.groups.0.betas.0", "opt.groups.0.lr"} <= reads
    for _ in range(3):
        inputs = [*found.binding.fill(batch)]
        assert builders.same(builders.execute(after, inputs), builders.execute(before, inputs))
        step(*batch)
        schedule.step()


def _sources(node: fx.Node) -> set[fx.Node]:
    """The inputs that a node is made of."""
    found, pending = set(), [node]
    while pending:
        one = pending.pop()
        pending += one.all_input_nodes
        if one.op == "placeholder":
            found.add(one)
    return found


def test_what_can_read_packed_numbers_reads_no_other():
    for make in OPTIMIZERS.values():
        after = run_passes(without_communication(training(make)[2].program), [PACK])
        early = known_at_start(after.graph)
        for node in after.graph.nodes:
            if node.op == "call_function" and node not in early and segment_compiler.reads_packed(node):
                assert all(arg.target is element for arg in node.all_input_nodes if is_number(arg))
                assert segment_compiler.compiles(node)


def rate_of(tensors: list[Tensor]) -> list[Tensor]:
    return [*tensors, torch.tensor(0.3, dtype=torch.float64)]


def test_the_same_number_travels_once():
    def fn(x: Tensor, y: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        number = rate.item()
        double = number * 2
        return x * number, y + number, x * double, torch.addcmul(y, y, y, value=double)

    _, after = packed(fn, rate_of([torch.rand(3), torch.rand(2)]))
    (node,) = packs(after)
    assert len(node.args[0]) == 2
    assert len(elements(after)) == 4


def test_numbers_that_depend_on_data_stay():
    def fn(x: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        data = x.sum().item()
        number = rate.item()
        return x * data, x * (data * number), x * number, torch.addcmul(x, x, x, value=data)

    tensors = rate_of([torch.rand(3)])
    _, after = packed(fn, tensors)
    (node,) = packs(after)
    assert len(node.args[0]) == len(elements(after)) == 1
    assert_in_front(after, node)
    kept = [node for node in after.graph.nodes if op_info.is_op(node) and any(map(is_number, node.all_input_nodes))]
    assert sum(any(arg.target is not element for arg in node.all_input_nodes if is_number(arg)) for node in kept) == 3


def test_numbers_that_come_from_peers_stay():
    def fn(x: Tensor, count: Tensor) -> Tensor:
        total = op_info.WAIT(c10d.all_reduce.default(count, "sum", builders.world_group()))
        return x * total.item()

    program = builders.place(builders.capture(fn, [torch.rand(3), torch.tensor(2.0)]))
    assert packs(run_passes(program, [PACK])) == []


def test_counters_of_the_host_are_numbers_that_are_known():
    """A tensor without dimensions on the CPU is the host's; the new counter is a number, and still written."""

    def fn(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return x * (1 - 0.9 ** count.item())

    _, after = packed(fn, [torch.rand(3), torch.tensor(2.0)])
    (node,) = packs(after)
    assert_in_front(after, node)
    assert builders.count(after, operator.pow) == 1


def test_a_call_without_a_rule_keeps_its_numbers():
    def fn(x: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        number = rate.item()
        return torch.nn.functional.elu(x, number), x * number

    _, after = packed(fn, rate_of([torch.rand(3)]))
    (elu,) = after.graph.find_nodes(op="call_function", target=aten.elu.default)
    assert not any(arg.target is element for arg in elu.all_input_nodes)
    assert len(elements(after)) == 1


def test_numbers_made_of_constants_and_shapes_are_there_from_the_start():
    def fn(x: Tensor, rate: Tensor) -> Tensor:
        constant = torch.tensor(2.5, dtype=torch.float64)
        return x.exp() * (constant.item() * rate.item())

    _, after = packed(fn, rate_of([torch.rand(3)]))
    (node,) = packs(after)
    assert_in_front(after, node)


def test_a_second_time_changes_nothing():
    for make in OPTIMIZERS.values():
        once = run_passes(without_communication(training(make)[2].program), [PACK])
        assert printer.diff(run_passes(once, [PACK]), once) == ""


def test_nothing_to_pack_changes_nothing():
    before, after = packed(lambda x: (x * 2).exp(), [torch.rand(3)])
    assert printer.diff(before, after) == ""
    assert after.history[-1].notes == ()


def test_a_scheduled_program_stays_as_it_is():
    before = run_passes(without_communication(training(OPTIMIZERS["adamw"])[2].program), [reinplace])
    assert printer.diff(run_passes(before, [PACK]), before) == ""


def test_packed_numbers_keep_every_bit():
    numbers = [0.1, 1e-300, float("inf"), -0.0, 1 / 3]
    held = pack(numbers, torch.device("cpu"))
    assert held.dtype is torch.float64
    assert [element(held, place) for place in range(len(numbers))] == numbers
    assert str(element(held, 3)) == "-0.0"
