"""Side effects of one run are seen, undone and named."""

from __future__ import annotations

import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from wholestep.capture.effects.optimizer_effects import OptimizerEffects
from wholestep.capture.effects.side_effects import SideEffects
from wholestep.capture.native import build
from wholestep.capture.python.code_lines import writer_of
from wholestep.capture.python.snapshot import same
from wholestep.capture.reach.step_context import StepContext
from wholestep.errors import CaptureError, HyperparameterError


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.opt = torch.optim.Adam(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 1)
        self.calls: int = 0
        self.losses: list[Any] = []
        self.last: Any = None

    def step(self, x: Tensor) -> Any:
        return self.calls, self.losses, self.last, self.model(x), self.opt.step, self.scheduler


def around(trainer: Trainer) -> SideEffects:
    context = StepContext(trainer.step, (torch.ones(2),), {})
    context.lazy.discard()
    return SideEffects(context, OptimizerEffects(context))


def test_a_run_without_effects_changes_nothing() -> None:
    effects = around(Trainer())
    with effects:
        pass
    assert effects.changed == []


def test_numbers_and_lists_are_told_and_restored_on_demand() -> None:
    trainer = Trainer()
    losses = trainer.losses
    effects = around(trainer)
    with effects:
        trainer.calls += 1
        trainer.losses.append(0.5)
    assert {path for path, _, _ in effects.changed} == {"self.calls", "len(self.losses)"}
    assert trainer.calls == 1
    assert "Python state" in effects.sentence()
    effects.restore()
    assert trainer.calls == 0
    assert trainer.losses is losses == []


def test_a_tensor_kept_on_an_object_is_refused_at_once() -> None:
    trainer = Trainer()
    effects = around(trainer)
    with pytest.raises(CaptureError, match=r"self\.last.*Return the tensor instead"), effects:
        trainer.last = torch.ones(1)
    assert trainer.last is None


def numpy_state() -> tuple[Any, ...]:
    kind, keys, *rest = np.random.get_state()
    return (kind, keys.tolist(), *rest)  # type: ignore[union-attr]


@pytest.mark.parametrize(("name", "draw", "state"), [
    ("random", random.random, random.getstate),
    ("numpy.random", np.random.rand, numpy_state),
])  # fmt: skip
def test_draws_from_pythons_generators_are_refused_and_put_back(
    name: str, draw: Callable[[], Any], state: Callable[[], Any]
) -> None:
    before = state()
    effects = around(Trainer())
    with pytest.raises(CaptureError, match=f"draws from Python's {name} generator"), effects:
        draw()
    assert state() == before


def test_everything_is_restored_after_an_error() -> None:
    trainer = Trainer()
    effects = around(trainer)

    def fail() -> None:
        trainer.calls += 1
        trainer.model.eval()
        random.random()
        raise KeyError

    with pytest.raises(KeyError), effects:
        fail()
    assert trainer.calls == 0
    assert trainer.model.training


def test_optimizer_state_is_put_back() -> None:
    trainer = Trainer()
    with around(trainer):
        for param in trainer.model.parameters():
            param.grad = torch.ones_like(param)
        trainer.opt.step()
        assert len(trainer.opt.state) == 2
    assert len(trainer.opt.state) == 0


def test_a_python_list_in_optimizer_state_is_refused() -> None:
    trainer = Trainer()
    with pytest.raises(HyperparameterError, match=r"leaves a list in opt\.counts\.weight"), around(trainer):
        trainer.opt.state[trainer.model.weight]["counts"] = [1, 2]
    assert len(trainer.opt.state) == 0


def test_what_a_scheduler_moves_is_told_with_advice() -> None:
    trainer = Trainer()
    effects = around(trainer)
    trainer.opt._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns
    with effects:
        trainer.scheduler.step()
    assert effects.changed
    assert "Call scheduler.step() outside the step" in effects.sentence()
    effects.restore()
    assert trainer.scheduler.last_epoch == 0


def test_what_torch_notes_for_its_own_warnings_does_not_count() -> None:
    trainer = Trainer()
    effects = around(trainer)
    with effects:
        trainer.opt._opt_called = True  # type: ignore[attr-defined]
    assert effects.changed == []


def test_a_dict_whose_keys_change_places_is_told_and_restored() -> None:
    trainer, order = Trainer(), OrderedDict(a=1, b=2)
    trainer.last = order
    effects = around(trainer)
    with effects:
        order.move_to_end("a")
    assert [path for path, _, _ in effects.changed] == ["self.last"]
    effects.restore()
    assert list(order) == ["a", "b"]


@pytest.mark.parametrize("held", [{"a": torch.ones(1)}, [[torch.ones(1)]], (torch.ones(1),)])
def test_tensors_within_what_a_trace_leaves_are_refused_at_once(held: Any) -> None:
    """They are of the trace, and mean nothing after it, even where the step would leave them only once."""
    trainer = Trainer()
    effects = around(trainer)
    with pytest.raises(CaptureError, match="Python state"), effects:
        trainer.losses.append(held)
    assert trainer.losses == []


class _Log:
    def __init__(self):
        self.calls, self.seen = 0, {}

    def count(self):
        self.calls += 1

    def note(self):
        self.seen["x"] = 1


@pytest.mark.parametrize(
    ("path", "method"), [("log.calls", "count"), ("log.seen.x", "note"), ("len(log.seen)", "note"), ("log.other", None)]
)
def test_the_line_that_writes_is_found_in_the_code(path, method):
    found = writer_of(path, [_Log.count.__code__, _Log.note.__code__])
    if method is None:
        assert found == ""
    else:
        code = getattr(_Log, method).__code__
        assert found == f"{code.co_filename}:{code.co_firstlineno + 1} in {method}"


def test_a_step_that_sets_itself_up_is_one_graph_as_the_first_of_a_process() -> None:
    """What is loaded when it is first needed computes with tensors of its own, which are no part of the first trace."""
    assert build.wait() == ""
    build._build = build._Build()  # for good: C++ knows the classes that were loaded last
    trainer = Trainer()

    def step(x: Tensor) -> Tensor:
        trainer.last = "set up"
        return trainer.model(x).detach().sum()  # type: ignore[no-any-return]

    compiled = ws.compile(step, backend="eager", fullgraph=True)
    assert [compiled(torch.ones(2)) for _ in range(2)]
    assert trainer.last == "set up"


def test_the_containers_of_an_optimizer_are_put_back() -> None:
    trainer = Trainer()
    state, groups = trainer.opt.state, trainer.opt.param_groups
    with pytest.raises(HyperparameterError, match="other containers for its state"), around(trainer):
        trainer.opt.load_state_dict(trainer.opt.state_dict())
    assert trainer.opt.state is state
    assert trainer.opt.param_groups is groups


class Inverse:
    """Of a transform: it is made anew where nobody has kept it, and is known by a weak reference."""

    known: weakref.ReferenceType[Inverse] | None = None

    def apply(self, x: Tensor) -> Tensor:
        made = Inverse()
        self.known = weakref.ref(made)
        return x * 2


def test_a_weak_reference_to_what_is_gone_says_nothing() -> None:
    """Whatever a call has put there is gone after it, so each call leaves the same."""
    transform = Inverse()
    step = ws.compile(lambda x: transform.apply(x), backend="eager", fullgraph=True)
    assert [step(torch.ones(())).item() for _ in range(3)] == [2, 2, 2]
    assert transform.known is not None
    assert transform.known() is None


def test_a_weak_reference_to_another_object_is_another_one() -> None:
    kept = [nn.Linear(1, 1), nn.Linear(1, 1)]
    assert same(weakref.ref(kept[0]), weakref.ref(kept[0]))
    assert not same(weakref.ref(kept[0]), weakref.ref(kept[1]))
    assert not same(weakref.ref(kept[0], print), weakref.ref(kept[0]))
