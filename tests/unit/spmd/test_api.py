"""The older surface on one process: arguments, gradients, the cached object."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.unit.spmd.steps import Keeps, pair, train_step
from wholestep.errors import ConfigError
from wholestep.spmd import COMPILED_OBJECT_KEY, DataParallel, compile


def test_two_calls_without_zero_grad_do_not_add_up_and_share_a_graph() -> None:
    (mod, opt, x), (other, other_opt, _) = pair(), pair()
    step = compile()(train_step)
    for _ in range(2):
        step(mod, opt, x)
        train_step(other, other_opt, x)
        other_opt.zero_grad()
    assert torch.equal(mod.weight, other.weight)
    assert mod.weight.grad is None


def test_gradients_that_were_there_stay_and_take_no_part() -> None:
    mod, opt, x = pair()
    step = compile()(train_step)
    kept = torch.full_like(mod.weight, 5.0)
    graphs = []
    for number in range(2):
        before = mod.weight.detach().clone()
        mod.weight.grad = kept
        step(mod, opt, x)
        assert mod.weight.grad is kept
        assert kept.eq(5.0).all()
        torch.testing.assert_close(mod.weight, before - 0.1 * x.sum(0).expand(3, 3), msg=f"call {number}")
        graphs.append(step._compiled_obj.gm)
    mod.weight.grad = None
    step(mod, opt, x)
    assert graphs[0] is graphs[1] is step._compiled_obj.gm


def test_gradients_stay_where_an_error_ends_the_call() -> None:
    mod, opt, x = pair()

    @compile()
    def fails(mod: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> None:
        mod(x).sum().backward()
        raise ValueError("no")

    mod.weight.grad = kept = torch.ones_like(mod.weight)
    with pytest.raises(Exception, match="no"):
        fails(mod, opt, x)
    assert mod.weight.grad is kept


def test_modules_and_optimizers_may_come_from_a_closure() -> None:
    (mod, opt, x), (other, other_opt, _) = pair(), pair()

    @compile()
    def step(x: Tensor) -> list[Tensor | None]:
        train_step(mod, opt, x)
        return [param.grad for param in mod.parameters()]

    grads = [step(x) for _ in range(2)]
    for found in grads:
        other_opt.zero_grad()
        train_step(other, other_opt, x)
        assert all(torch.equal(one, param.grad) for one, param in zip(found, other.parameters(), strict=True))
    assert all(param.grad is None for param in mod.parameters())


def test_several_modules_and_optimizers() -> None:
    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        return a, b, torch.optim.SGD(a.parameters(), lr=0.1, momentum=0.9), torch.optim.AdamW(b.parameters())

    def step(a: nn.Module, b: nn.Module, opt: Any, other: Any, x: Tensor) -> None:
        b(torch.relu(a(x))).sum().backward()
        opt.step()
        other.step()

    compiled, ours, theirs, x = compile()(step), build(), build(), torch.randn(2, 3)
    for _ in range(3):
        compiled(*ours, x)
        step(*theirs, x)
        for opt in theirs[2:]:
            opt.zero_grad()
    for one, another in zip(ours[:2], theirs[:2], strict=True):
        assert torch.equal(one.weight, another.weight)
    found = compiled._compiled_obj
    assert found.modules == ours[:2]
    assert found.optimizers == ours[2:]
    assert (found.mod, found.opt) == (ours[0], ours[2])


def test_the_cached_object_describes_what_runs() -> None:
    mod, opt, x = pair()
    step = compile(module_override=[Keeps()])(train_step)
    assert COMPILED_OBJECT_KEY not in step.__dict__
    step(mod, opt, x)
    found = step.__dict__[COMPILED_OBJECT_KEY]
    assert found is step._compiled_obj
    assert [id(one) for one in found.flat_state] == [id(mod.weight), id(mod.bias)]
    names = [node.name for node in found.gm.graph.find_nodes(op="placeholder")]
    assert names[:2] == ["weight", "bias"]
    assert "add_.Tensor" in found.gm.code, "the code of the graph is that of the scheduled program"


def test_the_compiled_function_looks_like_the_step() -> None:
    step = compile()(train_step)
    assert (step.__name__, step.__module__) == (train_step.__name__, train_step.__module__)


def test_a_compiled_method_takes_the_object_as_its_first_argument() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.mod, self.opt, _ = pair()

        @compile()
        def step(self, x: Tensor) -> Tensor:
            return train_step(self.mod, self.opt, x)

    trainer, (mod, opt, x) = Trainer(), pair()
    assert torch.equal(trainer.step(x), train_step(mod, opt, x))
    assert torch.equal(trainer.mod.weight, mod.weight)


def test_inside_of_another_capture_the_step_is_plain() -> None:
    mod, opt, x = pair()
    inner = compile()(train_step)
    outer = compile()(functools.wraps(train_step)(lambda *args: inner(*args)))
    assert torch.equal(outer(mod, opt, x), train_step(*pair()[:2], x))
    assert COMPILED_OBJECT_KEY not in inner.__dict__


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: compile(module_override=[nn.Linear]), "Override"),  # type: ignore[list-item]
        (lambda: compile(gm_transformation=3), "function"),  # type: ignore[arg-type]
        (lambda: compile(parallel_mode="replicate"), "DataParallel"),  # type: ignore[arg-type]
        (lambda: DataParallel("fully_shard"), "replicate"),
        (lambda: DataParallel("default"), "replicate"),
    ],
)
def test_wrong_arguments(call: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        call()


def test_custom_passes_run_before_the_transformation_and_behind_the_overrides() -> None:
    order: list[str] = []

    class Notes(Keeps):
        def transform(self, gm: fx.GraphModule, flat_state: list[Tensor]) -> fx.GraphModule:
            order.append("override")
            return gm

    def note(name: str, gm: fx.GraphModule) -> fx.GraphModule:
        order.append(name)
        return gm

    mode = DataParallel("replicate", custom_passes=functools.partial(note, "custom"))
    step = compile([Notes(), Notes()], functools.partial(note, "transformation"), mode)(train_step)
    step(*pair())
    assert order == ["override", "override", "custom", "transformation"]
