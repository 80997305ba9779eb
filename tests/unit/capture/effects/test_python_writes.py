"""Every way in which a step writes to Python: no graph would do it again, so it is refused, undone, and runs live."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wholestep as ws
from tests.behaviour.harness import Record
from tests.behaviour.small_models import loss_of, sgd
from tests.behaviour.untouched import assert_untouched, batch, everything, net, place_of
from tests.harness.training import backward_and_step


class Writes:
    """A step that writes to one thing in Python, in the marked line."""

    def __init__(self) -> None:
        self.model = net()
        self.opt = sgd(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, step_size=1, gamma=0.5)
        self.calls, self.last, self.mean, self.slots = 0, None, torch.zeros(()), WithSlots()
        self.losses, self.log, self.queue, self.seen = [], {}, deque([1.0], 2), {1}  # type: ignore[var-annotated]
        self.order, self.array = OrderedDict(a=1, b=2), np.zeros(2)

    def run(self, write: Callable[[Any, dict[str, Any], Tensor], object], data: dict[str, Any]) -> Tensor:
        loss = backward_and_step(loss_of(self.model, data["x"], data["y"]), self.opt)
        write(self, data, loss.detach())
        return loss

    def held(self) -> Record:
        apart = ("model", "opt", "scheduler", "slots", "array", "seen", "queue")
        attributes = {name: value for name, value in vars(self).items() if name not in apart}
        schedule = {name: value for name, value in vars(self.scheduler).items() if name != "optimizer"}
        return everything(
            model=self.model, opt=self.opt, attributes=attributes, slot=self.slots.last, schedule=repr(schedule),
            seen=sorted(self.seen), array=self.array.tolist(), queue=list(self.queue), **held_outside(),
            flags=repr({key: one for key, one in vars(self.model).items() if not key.startswith("_")}),
        )  # fmt: skip


class WithSlots:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = None


class Kept:
    last: Any = None


LAST: Any = None


def writes_a_global(self: Any, data: Any, loss: Tensor) -> None:
    global LAST
    LAST = loss  # <- here


def writes_a_global_that_is_new(self: Any, data: Any, loss: Tensor) -> None:
    global NEWEST
    NEWEST = loss  # <- here


def _with_a_new_variable() -> Callable[[Any, Any, Tensor], None]:
    newest: Any  # not assigned yet

    def writes_a_variable_that_is_new(self: Any, data: Any, loss: Tensor) -> None:
        nonlocal newest
        newest = loss  # <- here

    return writes_a_variable_that_is_new


writes_a_variable_that_is_new = _with_a_new_variable()
(NEW_VARIABLE,) = writes_a_variable_that_is_new.__closure__ or ()


def held_outside() -> dict[str, Any]:
    """What the steps write outside of a training."""
    try:
        variable = NEW_VARIABLE.cell_contents
    except ValueError:
        variable = "nothing"
    return {"of_file": LAST, "of_class": Kept.last, "new": globals().get("NEWEST", "nothing"), "variable": variable}


@pytest.fixture(autouse=True)
def nothing_held_outside() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    Kept.last = globals()["LAST"] = None
    globals().pop("NEWEST", None)
    if held_outside()["variable"] != "nothing":
        del NEW_VARIABLE.cell_contents


def writes_a_class(self: Any, data: Any, loss: Tensor) -> None:
    Kept.last = 1.0 if Kept.last is None else Kept.last + 1  # <- here


def writes_a_number(self: Any, data: Any, loss: Tensor) -> None:
    self.calls += 1  # <- here


def writes_a_tensor(self: Any, data: Any, loss: Tensor) -> None:
    self.last = loss  # <- here


def writes_a_new_attribute(self: Any, data: Any, loss: Tensor) -> None:
    self.newest = loss  # <- here


def writes_a_slot(self: Any, data: Any, loss: Tensor) -> None:
    self.slots.last = loss  # <- here


def writes_an_average(self: Any, data: Any, loss: Tensor) -> None:
    self.mean = 0.9 * self.mean + 0.1 * loss  # <- here


def writes_an_object_of_tensors(self: Any, data: Any, loss: Tensor) -> None:
    self.last = {"loss": loss}  # <- here


def writes_an_item(self: Any, data: Any, loss: Tensor) -> None:
    self.log["loss"] = loss  # <- here


def writes_a_list(self: Any, data: Any, loss: Tensor) -> None:
    self.losses.append(loss)  # <- here


def writes_a_list_once(self: Any, data: Any, loss: Tensor) -> None:
    if not self.losses:  # a cache of a tensor would hold one of the trace
        self.losses.append({"loss": loss})  # <- here


def writes_a_queue(self: Any, data: Any, loss: Tensor) -> None:
    self.queue.append(2.0)  # <- here


def writes_a_set(self: Any, data: Any, loss: Tensor) -> None:
    self.seen.add(len(self.seen) + 1)  # <- here


def writes_an_order(self: Any, data: Any, loss: Tensor) -> None:
    self.order.move_to_end(next(iter(self.order)))  # <- here


def writes_an_array(self: Any, data: Any, loss: Tensor) -> None:
    self.array[0] += 1  # <- here


def writes_a_flag_of_a_module(self: Any, data: Any, loss: Tensor) -> None:
    self.model[2].training = not self.model[2].training  # <- here


def writes_a_buffer(self: Any, data: Any, loss: Tensor) -> None:
    self.model[1].running_mean = self.model[1].running_mean * 0.5  # <- here


def writes_a_rate(self: Any, data: Any, loss: Tensor) -> None:
    self.opt.param_groups[0]["lr"] *= 0.5  # <- here


def writes_state_of_an_optimizer(self: Any, data: Any, loss: Tensor) -> None:
    self.opt.state[self.model[0].weight]["count"] = 1  # <- here


def writes_a_tensor_of_a_group(self: Any, data: Any, loss: Tensor) -> None:
    self.opt.param_groups[0]["note"] = "seen"  # <- here


def takes_out_of_an_argument(self: Any, data: Any, loss: Tensor) -> None:
    data.pop("y")  # <- here


def writes_to_an_argument(self: Any, data: Any, loss: Tensor) -> None:
    data["loss"] = loss  # <- here


def writes_plain_to_an_argument(self: Any, data: Any, loss: Tensor) -> None:
    data["number"] = 1  # <- here


def writes_to_a_list_of_an_argument(self: Any, data: Any, loss: Tensor) -> None:
    data["losses"].append(loss)  # <- here


def writes_to_a_tensor_of_an_argument(self: Any, data: Any, loss: Tensor) -> None:
    data["x"].seen = True  # <- here


WRITES = [
    one
    for name, one in list(globals().items())
    if name.startswith(("writes_", "takes_")) and isinstance(one, FunctionType)
]


def data_of_a_call(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    x, y = batch()
    return {"x": x, "losses": [], "y": y}


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_to_python_is_refused_at_its_line_and_undone(write: Any) -> None:
    trainer, data = Writes(), data_of_a_call()
    before, kept = trainer.held(), list(data.items())
    step = ws.compile(lambda data: trainer.run(write, data), backend="eager", fullgraph=True)
    with pytest.raises(ws.CaptureError, match=re.escape(place_of(write)) + r"\b"):
        step(data)
    assert_untouched(before, trainer.held())
    assert list(data.items()) == kept
    assert data["losses"] == []
    assert vars(data["x"]) == {}


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_a_write_to_python_happens_at_every_call_of_a_live_step(write: Any, may_go_live: bool) -> None:
    runs: list[list[Record]] = []
    for compile_ in (lambda step: step, partial(ws.compile, backend="eager")):
        forget()
        torch.manual_seed(0)
        trainer = Writes()
        step = compile_(lambda data, trainer=trainer: trainer.run(write, data))
        runs.append([])
        for call in range(4):
            data = data_of_a_call(call)
            result, marks = step(data), repr(vars(data["x"]))
            runs[-1].append({**everything(result=result, data=data, marks=marks), **trainer.held()})
    for wanted, found in zip(*runs, strict=True):
        for path in [path for path in wanted if path.endswith((":ids", ":owned", ":keys")) and path in found]:
            if path.startswith(("model", "opt")):  # of which there are two
                del wanted[path], found[path]
        assert_untouched(wanted, found)


@pytest.mark.parametrize("may_go_live", [True])
def test_a_trace_that_is_given_up_at_its_end_leaves_nothing(may_go_live: bool) -> None:
    """It has drawn of a generator that it made itself, which is told when all of the step has run."""
    counts = {"eager": 0, "ours": 0}

    def step(x: Tensor, key: str) -> Tensor:
        counts[key] += 1
        return x * torch.randn(2, generator=torch.Generator().manual_seed(counts[key]))

    compiled = ws.compile(step, backend="eager")
    for _ in range(3):
        assert torch.equal(step(torch.ones(2), "eager"), compiled(torch.ones(2), "ours"))
    assert counts["ours"] == counts["eager"] == 3
