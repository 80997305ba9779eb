"""Python that runs while a step is traced runs once and never again.

A step that changes anything there is refused as one graph and undone, and runs live. Nothing may be baked in silence.
"""

from __future__ import annotations

import random
import re
import warnings
from operator import length_hint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import wholestep as ws
from tests.behaviour.harness import Record
from tests.behaviour.small_models import loss_of, sgd
from tests.behaviour.untouched import assert_untouched, batch, everything, net, place_of, untouched
from tests.harness.training import backward_and_step

HERE = Path(__file__).name


class Trainer:
    """Everything a step may reach: counters, lists, a scheduler."""

    def __init__(self) -> None:
        self.model = net()
        self.opt = sgd(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, step_size=1, gamma=0.5)
        self.milestones = torch.optim.lr_scheduler.MultiStepLR(self.opt, [2, 4])
        self.calls, self.losses, self.log = 0, [], {"loss": None}  # type: ignore[var-annotated]
        self.random, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator()
        self.batches = iter([batch()])

    def update(self, x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(self.model, x, y), self.opt)

    def counter(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return self.update(x, y)

    def growing_list(self, x: Tensor, y: Tensor) -> Tensor:
        self.losses.append(self.update(x, y).detach())
        return self.losses[-1]

    def written_dictionary(self, x: Tensor, y: Tensor) -> Tensor:
        self.log["loss"] = self.update(x, y).detach()
        return self.log["loss"]

    def new_attribute(self, x: Tensor, y: Tensor) -> Tensor:
        self.last_loss = self.update(x, y).detach()
        return self.last_loss

    def scheduler_inside(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.update(x, y)
        self.scheduler.step()
        return loss

    def milestones_inside(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.update(x, y)
        self.milestones.step()  # asks a dict of Python for the number of the epoch
        return loss

    def rate_written_inside(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.update(x, y)
        self.opt.param_groups[0]["lr"] *= 0.5
        return loss

    def python_random(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x * random.random(), y)

    def numpy_random(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x * float(np.random.rand()), y)

    def own_random(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x * self.random.random(), y)

    def own_numpy(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x * float(self.numpy.random()), y)

    def seed(self, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.update(x + torch.randn(x.shape), y)

    def own_seed(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x + torch.randn(x.shape, generator=self.torch.manual_seed(3)), y)

    def new_generator(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(x + torch.randn(x.shape, generator=torch.Generator().manual_seed(3)), y)

    def next_batch(self, x: Tensor, y: Tensor) -> Tensor:
        return self.update(*next(self.batches))

    def hooks(self, x: Tensor, y: Tensor) -> Tensor:
        self.model[0].bias.register_hook(lambda grad: grad / 2)
        return self.update(x, y)

    def seen(self) -> Record:
        apart = ("model", "opt", "scheduler", "milestones")
        attributes = {name: value for name, value in vars(self).items() if name not in apart}
        seen = everything(model=self.model, opt=self.opt, attributes=attributes)
        for one in (self.scheduler, self.milestones):
            schedule = {name: value for name, value in vars(one).items() if name != "optimizer"}
            seen[type(one).__name__] = repr(schedule)
        seen["random"], seen["numpy"] = self.random.getstate(), repr(self.numpy.bit_generator.state)
        seen["hooks"] = len(self.model[0].bias._backward_hooks or {})
        seen["torch"], seen["batches left"] = self.torch.get_state().tolist(), length_hint(self.batches)
        return seen


SIDE_EFFECTS = {  # method -> what the message must name
    "growing_list": "losses",
    "milestones_inside": r"scheduler\.step\(\) outside",
    "python_random": "random",
    "numpy_random": "numpy",
    "own_random": r"draws from self\.random",
    "own_numpy": r"draws from self\.numpy",
    "seed": "seeds torch's own generator",
    "own_seed": r"seeds self\.torch|Generator",
    "new_generator": "Generator",
    "hooks": r"hook of 0\.bias .* handle\.remove\(\)",
    "next_batch": r"reaches self\.batches, a list_iterator",
}


@pytest.mark.parametrize("name", SIDE_EFFECTS)
def test_side_effect_is_refused_and_undone(name: str) -> None:
    trainer = Trainer()
    x, y = batch()
    step = ws.compile(getattr(trainer, name), backend="eager", fullgraph=True)
    before = trainer.seen()
    with pytest.raises(ws.CaptureError, match=SIDE_EFFECTS[name]) as raised:
        step(x, y)
    assert HERE in str(raised.value)
    assert_untouched(before, trainer.seen())


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch traces no generator as an argument")
def test_a_generator_that_was_there_goes_on_from_call_to_call() -> None:
    def step(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.randn(x.shape, generator=generator)

    plain, compiled, run = torch.Generator(), torch.Generator(), ws.compile(step, backend="eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(step(torch.ones(3), plain), run(torch.ones(3), compiled))
    assert torch.equal(plain.get_state(), compiled.get_state())
    assert run.cache_info().traces == 1


def test_iterators_that_the_step_makes_are_its_own() -> None:
    module = net()
    opt = sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        first = next(module.parameters())
        return backward_and_step(loss_of(module, x.to(next(iter([first.dtype]))), y), opt)

    x, y = batch()
    ws.compile(step, backend="eager", fullgraph=True)(x, y)


def printing(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = backward_and_step(loss_of(model, x, y), opt)
    print(round(loss.item(), 3))  # <- here
    return loss


def printing_a_tensor(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = backward_and_step(loss_of(model, x, y), opt)
    print(loss)  # <- here
    return loss


def printing_a_word(model: Any, opt: Any, x: Tensor, y: Tensor) -> Tensor:
    print("a step")  # <- here
    return backward_and_step(loss_of(model, x, y), opt)


PRINTING = [printing, printing_a_tensor, printing_a_word]


@pytest.mark.parametrize("fn", PRINTING, ids=lambda fn: fn.__name__)
def test_a_print_is_refused_and_nothing_is_printed(fn: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = net()
    opt = sgd(module)
    x, y = batch()
    with untouched(module=module, opt=opt), pytest.raises(ws.CaptureError, match=re.escape(place_of(fn)) + r"\b"):
        ws.compile(fn, backend="eager", fullgraph=True)(module, opt, x, y)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("may_go_live", [True])
@pytest.mark.parametrize("fn", PRINTING, ids=lambda fn: fn.__name__)
def test_a_step_that_prints_goes_live_and_prints_at_every_call(
    fn: Any, may_go_live: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    said = []
    for step in (fn, ws.compile(fn, backend="eager")):
        torch.manual_seed(0)
        module = net()
        opt = sgd(module)
        for call in range(4):
            torch.manual_seed(call)
            step(module, opt, *batch())
        said.append(capsys.readouterr().out)
    assert said[0].count("\n") == 4
    assert said[1] == said[0]


def test_a_step_without_side_effects_is_not_suspected() -> None:
    """Local containers, comprehensions and counters of its own are a step's own business."""
    module = net()
    opt = sgd(module)

    @ws.compile(backend="eager", fullgraph=True)
    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        parts, count = [], 0
        for half in x.split(3):
            parts.append(module(half))
            count += len(half)
        report = {"loss": F.cross_entropy(torch.cat(parts), y)}
        report["scaled"] = backward_and_step(report["loss"], opt) * count
        return report

    x, y = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = [step(torch.cat([x, x[:1]]), torch.cat([y, y[:1]])) for _ in range(3)]
    assert all(set(result) == {"loss", "scaled"} for result in results)
