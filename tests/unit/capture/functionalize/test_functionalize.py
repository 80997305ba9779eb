"""A captured program writes nothing in place: what changes is returned, hidden writes and custom operators included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.unit.capture.steps import Blocks, calls, differing, mutating, program_of, train, twins
from wholestep.capture.functionalize.functionalize import functional_twin
from wholestep.ir.program import InputKind, OutputKind, Program


@torch.library.custom_op("wholestep_unit::halve_", mutates_args=("x",))
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


@torch.library.custom_op("wholestep_unit::shift_and_norm", mutates_args=("x",))
def shift_and_norm(x: Tensor, by: float) -> Tensor:
    x.add_(by)
    return x.norm()


@shift_and_norm.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return x.new_empty(())


@torch.library.custom_op("wholestep_unit::zero_all_", mutates_args=("xs",))
def zero_all_(xs: list[Tensor]) -> None:
    for x in xs:
        x.zero_()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def with_custom_operators(model: Any, opt: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    halve_(model.weight.grad)
    norm = shift_and_norm(model.bias.grad, 0.25)
    with torch.no_grad():
        zero_all_([model.a, model.b])
    opt.step()
    opt.zero_grad()
    return loss + norm


class WithBuffers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)
        self.register_buffer("a", torch.ones(2))
        self.register_buffer("b", torch.ones(3))


def written(program: Program, *kinds: InputKind) -> set[str]:
    return {
        o.name for o in program.outputs
        if o.kind is OutputKind.WRITE and o.target is not None and program.inputs[o.target].kind in kinds
    }  # fmt: skip


def test_custom_operators_that_write_become_twins() -> None:
    model = WithBuffers()
    program = program_of(with_custom_operators, model, sgd(model), torch.ones(3, 4))
    ours = [str(node.target) for node in calls(program) if "wholestep_unit" in str(node.target)]
    assert len(ours) == 3
    assert all(target.startswith("wholestep_functional.") for target in ours)
    assert mutating(program) == []
    assert written(program, InputKind.BUFFER) == {"a", "b"}


def test_custom_operators_do_what_they_do_eagerly() -> None:
    eager, ours = twins(lambda: (model := WithBuffers(), sgd(model)))
    step = ws.compile(with_custom_operators)
    for call in range(3):
        for model, _ in (eager, ours):
            model.a.fill_(call)
        x = torch.randn(3, 4)
        assert torch.equal(with_custom_operators(*eager, x), step(*ours, x))
        assert differing(eager[0], ours[0]) == []
    assert not ours[0].b.any()


def test_a_twin_returns_the_results_and_then_the_copies() -> None:
    twin = functional_twin(torch.ops.wholestep_unit.shift_and_norm.default, (0,))
    x = torch.zeros(4)
    norm, new = twin(x, 1.0)
    assert torch.equal(x, torch.zeros(4))
    assert torch.equal(new, torch.ones(4))
    assert norm == 2
    assert functional_twin(torch.ops.wholestep_unit.shift_and_norm.default, (0,)) is twin


def test_an_operator_that_returns_its_argument_has_no_twin() -> None:
    with pytest.raises(ws.CaptureError, match=r"add_.*cannot be made functional"):
        functional_twin(torch.ops.aten.add_.Tensor, (0,))


def norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))


def test_hidden_writes_of_batch_norm_are_outputs() -> None:
    model = norm_net()
    program = program_of(train, model, sgd(model), torch.randn(3, 4))
    assert written(program, InputKind.BUFFER) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    model.eval()
    program = program_of(train, model, sgd(model), torch.randn(3, 4))
    assert written(program, InputKind.BUFFER) == set()


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [norm_net, lambda: Blocks(width=4, dropout=0.1)], ids=["norm", "blocks"])
def test_no_node_writes_in_place(make: Any, options: dict[str, bool]) -> None:
    model = make()
    program = program_of(train, model, torch.optim.AdamW(model.parameters(), **options), torch.randn(3, 4))
    assert [f"{n.name} {n.target}" for n in mutating(program)] == []
    assert written(program, InputKind.PARAM) == {name for name, _ in model.named_parameters()}
    assert len(written(program, InputKind.OPTIMIZER)) == 3 * len(list(model.parameters()))


def test_a_module_that_only_reads_writes_nothing() -> None:
    model = nn.Linear(4, 2)
    program = program_of(lambda x: model(x).sum(), torch.ones(3, 4))
    assert [o.kind for o in program.outputs] == [OutputKind.USER]


def test_an_argument_that_is_written_is_an_output() -> None:
    def step(x: Tensor) -> Tensor:
        x[0] = 7.0
        return x.sum()

    x = torch.ones(3)
    assert written(program_of(step, x), InputKind.USER) == {"args.0"}
    assert torch.equal(x, torch.ones(3))
    assert ws.compile(step)(x) == 9
    assert x[0] == 7


@pytest.mark.parametrize("p", [0.5, 0.2])
def test_masks_follow_the_memory_of_their_tensor(p: float) -> None:
    """``bernoulli_`` on channels-last memory draws in the order of the memory."""
    x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)

    def step(x: Tensor) -> Tensor:
        return nn.functional.dropout(x, p)

    torch.manual_seed(0)
    want = step(x)
    torch.manual_seed(0)
    came = ws.compile(step)(x)
    assert torch.equal(want, came)
    assert came.stride() == want.stride()
