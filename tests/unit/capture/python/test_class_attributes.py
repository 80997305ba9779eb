"""What a step reads of classes is looked at like what it reads of objects, with the native guards and without them."""

from __future__ import annotations

import abc
import copy
import enum
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api.cache.object_fingerprint import Line, NotComparable, object_fingerprint
from wholestep.capture.reach.reachability import find_reachable
from wholestep.capture.reach.step_context import StepContext

HERE = Path(__file__).name

FACTOR = 2.0


class Config:
    """Settings that nobody makes an object of."""

    clip = 2.0
    table: ClassVar = {"clip": 2.0}
    hidden = 2.0
    seen_by_loop = 0

    class Inner:
        clip = 2.0

    @classmethod
    def read(cls) -> float:
        return cls.hidden

    @staticmethod
    def factor() -> float:
        return FACTOR


class Special(Config):
    pass


class Mode(enum.Enum):
    TRAIN = 1


Mode.factor = 2.0  # type: ignore[attr-defined]


class Helper:
    factor = 2.0
    seen_by_loop = 0

    def apply(self, x: Tensor) -> Tensor:
        return x * self.factor

    def __rmul__(self, x: Tensor) -> Tensor:
        return x * 2


Made = abc.ABCMeta("Made", (), {"factor": 2.0})
"""A class of which Python says that it is one of the module ``abc``."""


class Scaled(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * Scaled.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * FACTOR


@dataclass
class Batch:
    x: Tensor

    def scaled(self) -> Tensor:
        return self.x * self.factor  # type: ignore[attr-defined, no-any-return]


Batch.factor = 2.0  # type: ignore[attr-defined]


class Base(nn.Module):
    inherited = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.read: Callable[[Tensor], Any] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.own(x)


class Net(Base):
    scale = 2.0
    scales: ClassVar = [2.0]

    def own(self, x: Tensor) -> Any:
        return self.read(x)

    def helper(self) -> float:
        return FACTOR

    @property
    def asked(self) -> float:
        return FACTOR


class Descent(torch.optim.SGD):
    factor = 2.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad * self.factor * group["lr"])


Change = tuple[Any, str, Any]
"""What is set: on which class, under which name, to what."""

HELPER = Helper()
READS: dict[str, tuple[Callable[[Net, Tensor], Any], Change, str]] = {
    "number of a module": (lambda net, x: net.scale, (Net, "scale", 3.0), "Net.scale was 2.0, is 3.0"),
    "number asked for by name": (lambda net, x: getattr(net, "scale"), (Net, "scale", 3.0), "Net.scale was"),  # noqa: B009
    "number of a base": (lambda net, x: net.inherited, (Base, "inherited", 3.0), "Base.inherited was 2.0, is 3.0"),
    "number that hides one": (lambda net, x: net.inherited, (Net, "inherited", 3.0), "Net.inherited was nothing, is 3"),
    "list of a class": (lambda net, x: net.scales[0], (Net.scales, "0", 3.0), "Net.scales[0] was 2.0, is 3.0"),
    "method": (lambda net, x: net.helper(), (Net, "helper", lambda net: 3.0), "Net.helper was <function Net.helper"),
    "global in a method": (lambda net, x: net.helper(), (None, "FACTOR", 3.0), "FACTOR was 2.0, is 3.0"),
    "property": (lambda net, x: net.asked, (Net, "asked", property(lambda net: 3.0)), "Net.asked was <property"),
    "global in a property": (lambda net, x: net.asked, (None, "FACTOR", 3.0), "FACTOR was 2.0, is 3.0"),
    "forward": (
        lambda net, x: 2.0, (Base, "forward", lambda net, x: net.linear(x) * 3), "Base.forward was <function Base.forw"
    ),
    "number of a class": (lambda net, x: Config.clip, (Config, "clip", 3.0), "Config.clip was 2.0, is 3.0"),
    "number of a class by name": (lambda net, x: getattr(Config, "clip"), (Config, "clip", 3.0), "Config.clip was"),  # noqa: B009
    "number of the base of a class": (lambda net, x: Special.clip, (Config, "clip", 3.0), "Config.clip was 2.0, is"),
    "class made by a call": (lambda net, x: Made.factor, (Made, "factor", 3.0), "Made.factor was 2.0, is 3.0"),  # type: ignore[attr-defined]
    "class within a class": (lambda net, x: Config.Inner.clip, (Config.Inner, "clip", 3.0), "Inner.clip was 2.0, is"),
    "dict of a class": (lambda net, x: Config.table["clip"], (Config.table, "clip", 3.0), "Config.table.clip was 2.0"),
    "number in a class method": (lambda net, x: Config.read(), (Config, "hidden", 3.0), "Config.hidden was 2.0, is"),
    "global in a static method": (lambda net, x: Config.factor(), (None, "FACTOR", 3.0), "FACTOR was 2.0, is 3.0"),
    "enumeration": (lambda net, x: Mode.TRAIN.factor, (Mode, "factor", 3.0), "Mode.factor was 2.0"),  # type: ignore[attr-defined]
    "number of an object": (lambda net, x: HELPER.apply(x), (Helper, "factor", 3.0), "Helper.factor was 2.0, is 3.0"),
    "number of a new object": (lambda net, x: Helper().apply(x), (Helper, "factor", 3.0), "Helper.factor was 2.0"),
    "method of an object": (lambda net, x: HELPER.apply(x), (Helper, "apply", lambda h, x: x), "Helper.apply was"),
    "special method": (lambda net, x: x * HELPER, (Helper, "__rmul__", lambda h, x: x), "Helper.__rmul__ was"),
    "autograd function": (lambda net, x: Scaled.apply(x), (Scaled, "factor", 3.0), "Scaled.factor was 2.0, is 3.0"),
    "global in a backward": (lambda net, x: Scaled.apply(net.linear(x)), (None, "FACTOR", 3.0), "FACTOR was 2.0"),
    "class of an argument": (lambda net, x: 2.0, (Batch, "factor", 3.0), "Batch.factor was 2.0, is 3.0"),
    "optimizer": (lambda net, x: 2.0, (Descent, "factor", 3.0), "Descent.factor was 2.0, is 3.0"),
    "step of an optimizer": (lambda net, x: 2.0, (Descent, "step", torch.optim.SGD.step), "Descent.step was"),
}  # fmt: skip
ABSENT = object()


def put(change: Change) -> Callable[[], None]:
    """Sets something; the result sets it back."""
    where, name, value = change
    holder = globals() if where is None else where
    if isinstance(holder, (dict, list)):
        key: Any = name if isinstance(holder, dict) else int(name)
        old = holder[key]
        holder[key] = value
        return lambda: holder.__setitem__(key, old)
    old = vars(holder).get(name, ABSENT)
    setattr(holder, name, value)
    return lambda: delattr(holder, name) if old is ABSENT else setattr(holder, name, old)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.getLogger("wholestep").disabled = True
    yield
    logging.getLogger("wholestep").disabled = False


class Job:
    """A step on a net that multiplies by what `read` gives."""

    def __init__(self, read: Callable[[Net, Tensor], Any]) -> None:
        torch.manual_seed(0)
        self.net = Net()
        net = self.net
        net.read = lambda x: read(net, x)
        self.opt = Descent(net.parameters(), lr=0.01)

    def step(self, batch: Batch) -> Tensor:
        return backward_and_step(self.net(batch.scaled()).square().mean(), self.opt).detach()


def batch() -> Batch:
    return Batch(torch.linspace(-1, 1, 8).reshape(4, 2))


def losses(step: Callable[[Batch], Tensor], change: Change) -> list[float]:
    """Of six calls: two, two after a change, two after it is set back."""
    found = [step(batch()).item(), step(batch()).item()]
    back = put(change)
    try:
        found += [step(batch()).item(), step(batch()).item()]
    finally:
        back()
    return [*found, step(batch()).item(), step(batch()).item()]


@pytest.mark.parametrize("name", READS)
def test_a_change_is_one_retrace_and_none_when_it_is_set_back(kind: str, name: str) -> None:
    read, change, reason = READS[name]
    wanted = losses(Job(read).step, change)
    compiled = ws.compile(Job(read).step, backend="eager")
    assert losses(compiled, change) == pytest.approx(wanted, rel=1e-5)
    assert wanted[2] != pytest.approx(wanted[3], rel=1e-5), "the case shows nothing"
    info = compiled.cache_info()
    assert (info.traces, len(info.reasons)) == (2, 1)
    assert reason in info.reasons[0]


class Abstract(Net, abc.ABC):
    @abc.abstractmethod
    def made(self) -> int: ...


def of_abc(job: Job) -> None:
    Abstract.register(int)
    isinstance(3, Abstract)
    abc.update_abstractmethods(Abstract)


IDLE: dict[str, Callable[[Job], object]] = {
    "copied": lambda job: copy.deepcopy(HELPER),  # notes the names of slots in the class
    "annotations asked for": lambda job: (type(job.net).__annotations__, Helper.__annotations__),
    "described": lambda job: setattr(type(job.net), "__doc__", "Another text."),
    "abstract classes": of_abc,
    "something of a framework": lambda job: setattr(type(job.net), "_cache_of_a_framework", {}),
    "a counter in the class of an object": lambda job: setattr(Helper, "seen_by_loop", Helper.seen_by_loop + 1),
    "a counter in a class": lambda job: setattr(Config, "seen_by_loop", Config.seen_by_loop + 1),
    "the same number": lambda job: setattr(Net, "scale", float("2")),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_does_not_matter_is_no_retrace(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for one, key in ((Helper, "seen_by_loop"), (Config, "seen_by_loop"), (Net, "scale")):
        monkeypatch.setattr(one, key, getattr(one, key))
    job = Job(lambda net, x: HELPER.apply(x) * Config.clip * net.scale)
    job.net.__class__ = type("Concrete", (Abstract,), {"made": lambda net: 1, "__module__": __name__})
    compiled = ws.compile(job.step, backend="eager")
    for _ in range(3):
        compiled(batch())
        IDLE[name](job)
    compiled(batch())
    assert compiled.cache_info().traces == 1


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x * 2


def test_a_step_that_counts_in_the_class_of_a_module_is_refused() -> None:
    module = Counts()
    step = ws.compile(lambda x: module(x).sum(), backend="eager", fullgraph=True)
    with pytest.raises(ws.CaptureError, match=rf"{HERE}:\d+ in forward: Counts.calls was 0, is 1"):
        step(torch.ones(2))
    assert Counts.calls == 0


class Trainer:
    """A class whose constructor and comparison name what the loop counts."""

    def __init__(self, net: Net) -> None:
        self.net, self.seen_by_loop = net, 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trainer) and self.seen_by_loop == other.seen_by_loop

    __hash__ = object.__hash__

    def step(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_constructors_and_comparisons_are_not_read_for_names() -> None:
    trainer = Trainer(Net())
    found = find_reachable(trainer.step, (torch.ones(1, 2),), {})
    trainer.seen_by_loop += 1
    assert not [path for watch in found.snapshots for path, *_ in watch.changes()]


def lines_of(net: Net) -> list[Line]:
    with StepContext(lambda x: net(x), (torch.ones(1, 2),), {}) as context:
        return object_fingerprint(context, {})


def test_another_process_sees_what_classes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    net.read = Net.helper
    before = dict(lines_of(net))
    monkeypatch.setattr(Net, "scale", 3.0)
    monkeypatch.setattr(Net, "helper", lambda net: 4.0)
    after = dict(lines_of(net))
    assert {name for name in before if before[name] != after.get(name)} >= {"Net.scale", "Net.helper"}


def test_what_a_decorator_of_a_method_holds_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that the step does not run may hold anything (a generator), and is known by its code."""
    held = iter([1])

    def hold(net: Net) -> Any:
        return held

    monkeypatch.setattr(Net, "unused", hold, raising=False)
    assert any(name == "Net.unused" for name, _ in lines_of(Net()))
    monkeypatch.setattr(Net, "unused", held)
    with pytest.raises(NotComparable, match=r"Net\.unused"):
        lines_of(Net())
