"""Objects of installed libraries: what they hold is looked at, under the names in their own methods; and optimizers
that are put around others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributions import AffineTransform, Normal, TransformedDistribution

import wholestep as ws
from tests.harness.training import backward_and_step
from wholestep.api.report.live_explanation import LiveExplanation
from wholestep.errors import CaptureError

LIBRARY = '''
import torch


class Average:
    """An average of parameters that counts for itself, as that of diffusers."""

    def __init__(self, params):
        self.shadow_params = [param.detach().clone() for param in params]
        self.optimization_step, self.max_decay = 0, 0.9

    @torch.no_grad()
    def step(self, params):
        self.optimization_step += 1
        decay = min(self.max_decay, (1 + self.optimization_step) / (10 + self.optimization_step))
        for own, param in zip(self.shadow_params, params):
            own.sub_((1 - decay) * (own - param))


class Plugin:
    """Written to by nobody, and read at every call."""

    def __init__(self):
        self.scale = 1.0

    def scaled(self, loss):
        return loss * self.scale


class Trainer:
    """One that keeps a log and examples, of which a step reads nothing; and a part that it reads."""

    def __init__(self, model, opt):
        self.model, self.opt, self.plugin = model, opt, Plugin()
        self.log, self.seen = [], 0
        self.examples, self.queue = [{"x": number} for number in range(5000)], zip("ab", "cd")

    def train(self, x):
        loss = self.plugin.scaled(self.model(x).square().mean())
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach()

    def first_example(self, x):
        return self.train(x) * self.examples[0]["x"]

    def next_letter(self, x):
        return self.train(x) * len(next(self.queue))

    def everything(self, x):
        return self.train(x) * len(vars(self)["examples"])


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as that of accelerate: it has no groups and no state of its own."""

    def __init__(self, optimizer):
        self.optimizer, self.enabled = optimizer, True

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        if self.enabled:
            self.optimizer.step(closure)


class Fabric:
    """Likewise, as that of Lightning's Fabric: an object of a class made of its own and the other's."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Fabric" + type(optimizer).__name__, (type(self), type(optimizer)), {})

    def step(self, closure=None):
        return self._optimizer.step()

    def __getattr__(self, name):
        return getattr(self._optimizer, name)
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "a_library_of_objects.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("a_library_of_objects")
    del sys.modules["a_library_of_objects"]


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(number: int = 6) -> list[Tensor]:
    return [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(number)]


def held(model: nn.Module, opt: Any) -> list[Tensor]:
    return [
        *(param.detach().clone() for param in model.parameters()),
        *(one.clone() for state in opt.state.values() for one in state.values()),
    ]


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("as_argument", [False, True])
def test_what_an_average_of_a_library_counts_is_seen(library: Any, as_argument: bool, may_go_live: bool) -> None:
    """Whether the step is given it or not: no name in the user's code tells of what it holds."""

    def run(compiled: bool) -> tuple[list[Tensor], Any, Any]:
        model, opt = training()
        average = library.Average(list(model.parameters()))

        def update(average: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            backward_and_step(loss, opt)
            average.step(list(model.parameters()))
            return loss.detach()

        step: Any = (lambda x, average: update(average, x)) if as_argument else (lambda x: update(average, x))
        step = ws.compile(step, backend="eager") if compiled else step
        losses = [step(x, average) if as_argument else step(x) for x in batches()]
        return [*losses, *held(model, opt), *average.shadow_params], average.optimization_step, step

    (wanted, count, _), (found, counted, step) = run(False), run(True)
    assert_equal(found, wanted)
    assert count == counted == 6
    assert isinstance(step.explain(), LiveExplanation)


def test_what_is_set_on_an_object_of_a_library_is_not_stale(library: Any) -> None:
    def run(compiled: bool) -> list[Tensor]:
        (model, opt), plugin = training(), library.Plugin()

        def update(x: Tensor) -> Tensor:
            return backward_and_step(plugin.scaled(model(x).square().mean()), opt).detach()

        step = ws.compile(update, backend="eager") if compiled else update
        losses = []
        for number, x in enumerate(batches()):
            setattr(plugin, "scale", 1.0 + number)  # noqa: B010  # the name stands nowhere else in this file's code
            losses.append(step(x))
        return [*losses, *held(model, opt)]

    assert_equal(run(True), run(False))


@pytest.mark.parametrize("kind", ["Around", "Fabric"])
def test_an_optimizer_around_another_steps_as_it_does(library: Any, kind: str) -> None:
    def run(compiled: bool) -> tuple[list[Tensor], Any]:
        model, opt = training()
        around = getattr(library, kind)(opt)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)

        def update(opt: Any, x: Tensor) -> Tensor:
            return backward_and_step(model(x).square().mean(), opt).detach()

        step = ws.compile(update, backend="eager") if compiled else update
        losses = []
        for x in batches():
            losses.append(step(around, x))
            scheduler.step()
        return [*losses, *held(model, opt)], step

    (wanted, _), (found, step) = run(False), run(True)
    assert_equal(found, wanted)
    assert step.cache_info().traces == 1


def test_an_optimizer_around_another_is_read_at_every_call(library: Any) -> None:
    model, opt = training()
    around = library.Around(opt)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> None:
        backward_and_step(model(x).square().mean(), around)

    first, second = batches(2)
    step(first)
    around.enabled = False
    before = held(model, opt)
    step(second)
    assert_equal(held(model, opt), before)
    assert step.cache_info().traces == 2


@pytest.fixture
def averager() -> PeriodicModelAverager:
    """It counts its calls, and does no more in the first hundred."""
    no_group: Any = object()
    return PeriodicModelAverager(period=2, warmup_steps=100, process_group=no_group)


@pytest.mark.parametrize("may_go_live", [True])
def test_what_an_object_of_torch_counts_moves_on(averager: PeriodicModelAverager, may_go_live: bool) -> None:
    """No name in the user's code says that it counts."""
    model = torch.nn.Linear(2, 2)

    def step(x: Tensor) -> Tensor:
        averager.average_parameters(model.parameters())
        return model(x).sum()

    compiled = ws.compile(step, backend="eager")
    for call in range(3):
        compiled(torch.ones(2))
        assert averager.step == call + 1


def test_what_is_set_on_an_object_of_torch_is_not_stale(averager: PeriodicModelAverager) -> None:
    def step(x: Tensor) -> Tensor:
        return x * averager.period

    compiled = ws.compile(step, backend="eager")
    for period in (2, 3, 5):
        averager.period = period
        assert compiled(torch.ones(2)).tolist() == [period, period]


@pytest.mark.parametrize(
    "exchange",
    [
        lambda d: setattr(d.base_dist, "loc", torch.ones(2)),
        lambda d: setattr(d, "base_dist", Normal(torch.ones(2), torch.ones(2))),
        lambda d: d.transforms.__setitem__(0, AffineTransform(1.0, 3.0)),
        lambda d: setattr(d.transforms[0], "loc", 5.0),
        lambda d: setattr(d.transforms[0], "scale", torch.tensor(5.0)),
    ],
    ids=["tensor", "object", "item_of_a_list", "number", "number_by_a_tensor"],
)
def test_what_is_exchanged_inside_an_object_of_torch_is_not_stale(exchange: Callable[[Any], None]) -> None:
    """The user's code names nothing of what torch's own code reads."""
    drawn_from = TransformedDistribution(Normal(torch.zeros(2), torch.ones(2)), [AffineTransform(0.0, 2.0)])

    def step(x: Tensor) -> Tensor:
        return drawn_from.log_prob(x).sum()

    compiled = ws.compile(step, backend="eager")
    for change in (lambda _: None, exchange, lambda _: None):
        change(drawn_from)
        assert compiled(torch.ones(2)).item() == step(torch.ones(2)).item()
    assert compiled.cache_info().traces == 2, "and captured again once"


def test_what_is_exchanged_inside_an_object_of_numpy_is_not_stale() -> None:
    curve, bent = np.poly1d([1.0, 2.0]), np.vectorize(lambda value: 2 * value)

    def step(x: Tensor) -> Tensor:
        return x * float(curve(2.0)) + float(bent(2.0))

    compiled = ws.compile(step, backend="eager")
    assert compiled(torch.ones(())) == 8
    curve[0] = 5.0
    assert compiled(torch.ones(())) == 11
    bent.pyfunc = lambda value: 3 * value
    assert compiled(torch.ones(())) == 13


def test_two_classes_of_optimizers_in_one_file_train_the_same() -> None:
    """What is put into the file's scope while tracing is put there once."""

    class Mine(torch.optim.AdamW):
        pass

    model, opt = training()
    other, _ = training()
    own = Mine(other.parameters(), lr=0.01)

    @ws.compile(backend="eager")
    def step(x: Tensor) -> None:
        for net, one in ((model, opt), (other, own)):
            backward_and_step(net(x).square().mean(), one)

    for x in batches(3):
        step(x)
    assert_equal([*model.parameters()], [*other.parameters()])


def test_a_class_that_takes_itself_apart_is_not_written_to() -> None:
    model, opt = training()

    class Node:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    torch.utils._pytree.register_pytree_node(
        Node, lambda node: ([node.x], None), lambda parts, _: Node(parts[0]), serialized_type_name="tests.Node"
    )

    @ws.compile(backend="eager", fullgraph=True)
    def step(node: Node) -> None:
        node.x = node.x * 2
        backward_and_step(model(node.x).square().mean(), opt)

    (x,) = batches(1)
    node = Node(x)
    with pytest.raises(CaptureError, match=r"writes to argument 0\['x'\] at .*in step"):
        step(node)
    assert node.x is x


def test_a_dict_that_is_given_twice_is_not_written_to() -> None:
    model, _ = training()

    @ws.compile(backend="eager", fullgraph=True)
    def step(one: dict[str, Any], other: dict[str, Any]) -> None:
        one["loss"] = model(other["x"]).square().mean().detach()

    batch: dict[str, Any] = {"x": batches(1)[0]}
    with pytest.raises(CaptureError, match=r"writes to argument 0\['loss'\] at .*in step"):
        step(batch, batch)
    assert list(batch) == ["x"]


SETTINGS = """
SCALE, LIMITS = 1.0, {"w": 1.0}


def scaled(loss):
    return loss * SCALE
"""


def halve(settings: Any, loss: Tensor) -> Tensor:
    settings.LIMITS["w"] *= 0.5
    return loss


USES: dict[str, Any] = {
    "function": lambda settings, loss: settings.scaled(loss),
    "number": lambda settings, loss: loss * settings.SCALE,
    "container": lambda settings, loss: loss * settings.LIMITS["w"],
    "written container": halve,
}


@pytest.mark.parametrize(("name", "may_go_live"), [(name, USES[name] is halve) for name in USES])
def test_globals_of_a_package_are_read_at_every_call(
    name: str, may_go_live: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, use = tmp_path / "site-packages", USES[name]
    folder.mkdir()
    (folder / "a_package_of_settings.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(str(folder))

    def run(compiled: bool) -> list[float]:
        sys.modules.pop("a_package_of_settings", None)
        settings: Any = importlib.import_module("a_package_of_settings")
        model, opt = training()

        def update(x: Tensor) -> Tensor:
            loss = use(settings, model(x).square().mean())
            backward_and_step(loss, opt)
            return loss.detach()

        step = ws.compile(update, backend="eager") if compiled else update
        found = []
        for call, x in enumerate(batches(4)):
            found += [step(x).item(), settings.LIMITS["w"]]
            settings.SCALE, settings.LIMITS["w"] = 1.0 + call, settings.LIMITS["w"] + call
        return found

    assert run(compiled=True) == run(compiled=False)


def test_what_a_trace_has_not_read_of_a_library_may_move(library: Any) -> None:
    """A log that grows, counters, and many examples; what was read of it is still seen."""

    def run(compiled: bool) -> tuple[list[float], Any]:
        trainer = library.Trainer(*training())
        step = ws.compile(lambda x: trainer.train(x), backend="eager", fullgraph=True) if compiled else trainer.train
        losses = []
        for call, x in enumerate(batches(5)):
            losses.append(step(x).item())
            trainer.log.append({"loss": losses[-1]})
            trainer.seen += 1
            trainer.plugin.scale = 1.0 if call < 3 else 0.5
        return losses, step

    (wanted, _), (found, step) = run(False), run(True)
    assert found == wanted
    assert step.cache_info().traces == 2
    assert step.cache_info().reasons[0].endswith("plugin.scale was 1.0, is 0.5")


@pytest.mark.parametrize(
    ("method", "name"), [("first_example", "examples"), ("next_letter", "queue"), ("everything", "examples")]
)
def test_what_nobody_can_look_at_is_refused_where_a_trace_asks_for_it(library: Any, method: str, name: str) -> None:
    trainer = library.Trainer(*training())
    before = held(trainer.model, trainer.opt)
    step = ws.compile(lambda x: getattr(trainer, method)(x), backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=rf"it reaches trainer\.{name}"):
        step(batches(1)[0])
    assert_equal(held(trainer.model, trainer.opt), before)
    assert next(trainer.queue) == ("a", "c")


class Window:
    """Of the user's, on what a trainer of a library has."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples


@pytest.mark.parametrize("reads_window", [False, True])
def test_what_is_reached_by_another_way_too_is_refused(library: Any, reads_window: bool) -> None:
    """By a variable, and by an object that the walk comes to after the trainer."""
    trainer = library.Trainer(*training())
    window, examples = Window(trainer.examples), trainer.examples

    def of_window(x: Tensor) -> Tensor:
        return trainer.train(x) * window.examples[1]["x"]

    def of_variable(x: Tensor) -> Tensor:
        return trainer.train(x) * examples[1]["x"]

    step = ws.compile(of_window if reads_window else of_variable, backend="eager", fullgraph=True)
    with pytest.raises(CaptureError, match=r"it reaches \w+(\.examples)?, a list, of 5,000 things"):
        step(batches(1)[0])
