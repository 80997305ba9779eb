"""What is made functional without a second trace, and that it is the graph that one would give."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn

from tests.harness.training import backward_and_step
from tests.unit.capture.functionalize import test_mutation_subgraph as steps
from tests.unit.capture.steps import calls, program_of
from wholestep.capture import capture
from wholestep.capture.functionalize import functionalize, outplace
from wholestep.ir import node_meta, op_info

aten = torch.ops.aten


def a_type_that_only_the_call_in_place_keeps(x: Tensor, y: Tensor) -> Any:
    x.add_(y.double())
    return x * 2


def a_layout_that_only_the_call_in_place_keeps(x: Tensor, y: Tensor) -> Any:
    column = torch.full((2, 2), 3.0).as_strided((2,), (2,))
    column.mul_(y[0])
    return column.view(torch.int32), x


def random_numbers_in_place(x: Tensor, y: Tensor) -> Any:
    return torch.empty_like(x).bernoulli_(0.5) * y


def one_tensor_twice_in_a_list(x: Tensor, y: Tensor) -> Any:
    torch._foreach_mul_([x, x], 0)  # twice by something else, what functionalization gives is not what eager code does
    return x + y


def a_copy_of_an_input(x: Tensor, y: Tensor) -> Any:
    x.copy_(y * 3)
    y.copy_(x)
    return x + y


LIBRARY = torch.library.Library("wholestep_direct_tests", "DEF")
LIBRARY.define("either(Tensor x, Tensor y) -> Tensor")
LIBRARY.impl("either", lambda x, y: x + y, "CompositeExplicitAutograd")
torch.library.register_fake("wholestep_direct_tests::either", lambda x, y: torch.empty_like(x), lib=LIBRARY)


def memory_that_may_belong_to_either_of_two(x: Tensor, y: Tensor) -> Any:
    """Schemas of others are not believed."""
    made = torch.ops.wholestep_direct_tests.either(x.sin(), y.cos())
    made.add_(1)
    return made * 2


def a_form_with_other_arguments(x: Tensor, y: Tensor) -> Any:
    x.pow_(2)
    return x + y


def a_view_after_a_write(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    return x.t().exp(), x[0]


MORE = [
    a_type_that_only_the_call_in_place_keeps, a_layout_that_only_the_call_in_place_keeps, random_numbers_in_place,
    one_tensor_twice_in_a_list, a_copy_of_an_input, memory_that_may_belong_to_either_of_two,
    a_form_with_other_arguments, a_view_after_a_write,
]  # fmt: skip
TAKEN = {
    "nothing_is_written", "an_input_at_the_end", "an_input_and_later_readers", "lists_in_place",
    "the_result_of_a_write_is_read", "several_results", "a_view_of_what_the_part_makes", "results_that_nobody_reads",
    "a_copy_of_an_input",
}  # fmt: skip


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What is traced a second time."""
    seen: list[fx.GraphModule] = []
    original = functionalize._retrace

    def noted(traced: fx.GraphModule, *rest: Any) -> functionalize.Functional:
        seen.append(traced)
        return original(traced, *rest)

    monkeypatch.setattr(functionalize, "_retrace", noted)
    return seen


@pytest.mark.parametrize("step", [*steps.STEPS, *MORE], ids=lambda step: step.__name__)
def test_what_is_written_to_as_a_whole_needs_no_second_trace(
    step: Callable[..., Any], traces: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = steps.made_functional(step)
    assert (not traces) == (step.__name__ in TAKEN)
    monkeypatch.setattr(functionalize, "to_out_of_place", lambda whole, inputs: None)
    assert steps.described(ours) == steps.described(steps.made_functional(step))


@pytest.mark.parametrize("step", [*steps.STEPS, *MORE[:2], *MORE[3:]], ids=lambda step: step.__name__)
def test_it_computes_what_the_step_does(step: Callable[..., Any]) -> None:
    steps.assert_it_computes_what_the_step_does(step)


class Averaged(nn.Module):
    """With statistics that the forward writes, and a layer of which torch's kernel has a form of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell, self.head = nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.head(self.cell(self.norm(x))[0])
        return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD, one by one": lambda params: torch.optim.SGD(params, 0.1, 0.9, nesterov=True, foreach=False),
    "SGD, lists": lambda params: torch.optim.SGD(params, 0.1, 0.9, foreach=True),
    "AdamW, one by one": lambda params: torch.optim.AdamW(params, foreach=False),
    "AdamW, lists": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params: torch.optim.RMSprop(params, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_is_traced_once_and_the_graph_is_the_one_of_a_second_trace(
    name: str, traces: list[fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[int] = []

    def twice(*args: Any) -> functionalize.Functional:
        ours = functionalize.functionalize(*args)
        assert not traces
        with monkeypatch.context() as patch:
            patch.setattr(functionalize, "to_out_of_place", lambda whole, inputs: None)
            assert values(ours) == values(functionalize.functionalize(*args))
        traces.clear()
        captures.append(len(args))
        return ours

    monkeypatch.setattr(capture, "functionalize", twice)
    model, average = Averaged(), torch.zeros(4, 4)
    opt = OPTIMIZERS[name](model.parameters())

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            average.lerp_(model.head.weight, 0.5)
        return loss.detach()

    program = program_of(train, torch.ones(3, 4))
    assert len(captures) == 1
    assert not [node for node in calls(program) if op_info.mutated_args(node.target)]


def values(made: functionalize.Functional) -> tuple[Any, ...]:
    """Results, writes, and how often each value is computed, in any order; names of nodes and of symbols left out."""
    told: dict[fx.Node, str] = {}
    storages: set[int] = set()
    for node in made.module.graph.nodes:
        if node.op == "output":
            continue
        tensors = [one for one in node_meta.tensors(node) if one.layout is torch.strided]
        storages.update(one.untyped_storage()._cdata for one in tensors)
        layouts = [(one.shape, one.stride(), one.dtype, one.requires_grad) for one in tensors]
        given = fx.map_arg((node.args, node.kwargs), lambda arg: told_number(told[arg]))
        name = node.name if node.op == "placeholder" else ""
        told[node] = f"{name} {node.target} {given} {layouts} {node_meta.origin(node)}"
    ends = [told[one] if isinstance(one, fx.Node) else one for one in made.results]
    return ends, {place: told[one] for place, one in made.writes.items()}, Counter(told.values()), len(storages)


def told_number(text: str) -> str:
    return f"#{hash(re.sub(r' at 0x[0-9a-f]+', '', text))}"


def test_forms_are_those_with_the_same_arguments() -> None:
    assert outplace._functional_form(aten.add_.Tensor) is aten.add.Tensor
    assert outplace._functional_form(aten._foreach_lerp_.Scalar) is aten._foreach_lerp.Scalar
    assert outplace._functional_form(aten.copy_.default) is aten.copy.default
    for op in (
        aten.bernoulli_.float,
        aten.t_.default,
        aten.mm.out,
        aten.add.Tensor,
        aten.set_.default,
        aten.pow_.Scalar,
        "add_",
    ):
        assert outplace._functional_form(op) is None


def test_the_autocast_of_the_caller_does_not_touch_a_form(traces: list[fx.GraphModule]) -> None:
    total = torch.zeros(2, 2)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            total.addmm_(x, x)
        return x * 2

    with torch.autocast("cpu", torch.bfloat16):
        program = program_of(step, torch.ones(2, 2))
    assert not traces
    assert [node_meta.tensor(node).dtype for node in calls(program) if node.target is aten.addmm.default] == [
        torch.float32
    ]


def test_the_work_is_linear_in_the_length_of_lists() -> None:
    def made_by(count: int) -> int:
        def step(x: Tensor, y: Tensor) -> Any:
            made = torch._foreach_sqrt([x + number for number in range(count)])
            torch._foreach_add_(made, 1)
            return torch.stack(made)

        module, inputs, _ = steps.traced(step)
        frames = 0

        def count_frames(frame: Any, event: str, arg: Any) -> None:
            nonlocal frames
            frames += event == "call"

        sys.setprofile(count_frames)
        try:
            assert outplace.to_out_of_place(module, list(inputs)) is not None
        finally:
            sys.setprofile(None)
        return frames

    made_by(10)  # imports, caches
    assert made_by(200) < 2.2 * made_by(100)


def test_nobody_reads_pages_about_complex_parameters(caplog: pytest.LogCaptureFixture) -> None:
    """A number times a complex tensor asks for the number, of which torch makes an error that it prints itself."""
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
    opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        return backward_and_step((x.to(torch.complex64) @ weight).abs().sum(), opt).detach()

    logger = torch._subclasses.fake_tensor.log  # which hands nothing on
    logger.addHandler(caplog.handler)
    try:
        capture.capture(step, (torch.randn(4, 3),), {})
    finally:
        logger.removeHandler(caplog.handler)
    assert not [record.getMessage() for record in caplog.records if record.name == logger.name]
