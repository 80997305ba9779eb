"""Cases about dicts, lists and objects that a step is given, and to which it writes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import class_batches, loss_of, mlp, sgd
from tests.harness.training import backward_and_step

registry = Registry()
case = partial(registry.add, live=True)


class Batch:
    """What a loader gives; ``x`` and ``y``, and whatever a step adds."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.seen = x, y, 0


@dataclass(slots=True)
class WithSlots:
    x: Tensor
    y: Tensor
    losses: list[Any] = field(default_factory=list)


def given(
    run: Run, make: Callable[[Tensor, Tensor], Any], step: Callable[[Callable[[Tensor, Tensor], Tensor], Any], Any]
) -> Job:
    """A job whose step is given what `make` makes of a batch, and records what that holds after every call.

    ``step(update, batch)`` is the step; ``update(x, y)`` trains and gives the loss.
    """
    module = mlp()
    model, opt = run.model(module), sgd(module)
    kept: list[Any] = []

    def update(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(model, x, y), opt).detach()

    compiled = run.compile(lambda batch: step(update, batch))

    def call(x: Tensor, y: Tensor) -> Any:
        batch = make(x, y)
        result = compiled(batch)
        kept.append(contents(batch))
        return result

    objects = {"model": module, "opt": opt, "kept": lambda: [*kept]}
    return Job(step=call, batches=class_batches(run, 5), objects=objects)


def writes(make: Callable[[Tensor, Tensor], Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``step(update, batch)`` as a case whose batches ``make(x, y)`` makes."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        case(name=step.__name__)(lambda run: given(run, make, step))
        return step

    return register


def contents(thing: Any) -> Any:
    """Everything in a tree, in order."""
    if isinstance(thing, dict):
        return [(key, contents(one)) for key, one in thing.items()]
    if isinstance(thing, (list, tuple)):
        return [contents(one) for one in thing]
    if isinstance(thing, WithSlots):
        return contents([thing.x, thing.y, thing.losses])
    return contents(vars(thing)) if isinstance(thing, Batch) else thing


@writes(lambda x, y: {"x": x, "y": y})
def takes_out_of_its_batch(update: Any, batch: Any) -> Any:
    """As steps around models of Hugging Face do with their labels."""
    y = batch.pop("y")
    return update(batch["x"], y)


@writes(lambda x, y: {"x": x, "y": y, "name": "plain"})
def replaces_in_its_batch(update: Any, batch: Any) -> Any:
    batch["x"] = batch["x"] * 2
    batch["name"], batch["kept"] = "scaled", batch["y"]
    return update(batch["x"], batch["kept"])


@writes(lambda x, y: ({}, (x, y)))
def writes_losses_into_a_dict(update: Any, batch: Any) -> None:
    """One that is empty: nothing in it is an input."""
    log, (x, y) = batch
    loss = update(x, y)
    log["loss"], log["twice"] = loss, {"value": loss.item() * 2, "parts": [loss, loss + 1]}


@writes(lambda x, y: [x, y])
def appends_to_a_list_it_is_given(update: Any, batch: Any) -> Any:
    x, y = batch[:2]
    loss = update(x, y)
    batch.append(loss)
    batch.insert(0, batch.pop(1))
    return loss


@writes(Batch)
def sets_attributes_of_its_batch(update: Any, batch: Any) -> Any:
    batch.x = batch.x + 1
    batch.loss = update(batch.x, batch.y)
    batch.seen += 1
    del batch.y
    return batch.loss


@writes(WithSlots)
def sets_slots_of_its_batch(update: Any, batch: Any) -> Any:
    batch.losses = [update(batch.x, batch.y)]
    batch.losses.append(batch.losses[0] * 2)
    return batch.losses[1]


@case()
def writes_to_a_list_in_a_dict_in_an_object(run: Run) -> Job:
    def make(x: Tensor, y: Tensor) -> Batch:
        batch = Batch(x, y)
        batch.more = {"lists": [[x, 1], [y, 2]]}  # type: ignore[attr-defined]
        return batch

    def step(update: Any, batch: Any) -> Any:
        first, second = batch.more["lists"]
        loss = update(first[0], second[0])
        first[1] = loss
        second.clear()
        batch.more["lists"].reverse()
        return loss

    return given(run, make, step)


class Average:
    """Of parameters, with a number of its own: as libraries have it."""

    def __init__(self, params: list[Tensor]) -> None:
        self.shadow = [param.detach().clone() for param in params]
        self.count = 0
        self.decay: float | None = None

    @torch.no_grad()
    def update(self, params: list[Tensor]) -> None:
        self.count += 1
        self.decay = min(0.99, (1 + self.count) / (10 + self.count))
        for own, param in zip(self.shadow, params, strict=True):
            own.sub_((1 - self.decay) * (own - param))


@case()
def counts_in_an_average_it_is_given(run: Run) -> Job:
    """The same object in every call: its number is another one from the second on, and an input."""
    module = mlp()
    model, opt = run.model(module), sgd(module)
    average = Average(list(module.parameters()))

    @run.compile
    def step(average: Average, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        backward_and_step(loss, opt)
        average.update(list(module.parameters()))
        return loss.detach()

    objects = {"model": module, "opt": opt, "average": lambda: [average.count, average.decay, *average.shadow]}
    return Job(step=lambda x, y: step(average, x, y), batches=class_batches(run, 6), objects=objects)


class ByName(dict[str, Any]):
    """A dict whose keys are attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


@writes(lambda x, y: ByName(x=x, y=y))
def takes_out_of_a_dict_of_its_own_class(update: Any, batch: Any) -> Any:
    y = batch.pop("y")
    batch.loss = update(batch.x, y)
    return batch["loss"]


class Meter:
    """As training scripts have it."""

    def __init__(self) -> None:
        self.value = self.sum = self.count = self.average = 0

    def update(self, value: Any, number: int) -> None:
        self.value = value
        self.sum += value * number
        self.count += number
        self.average = self.sum / self.count  # type: ignore[assignment]


@case()
def counts_in_a_meter_it_is_given(run: Run) -> Job:
    """An object without tensors: no data, and looked at like what is reached in other ways."""
    module, meter = mlp(), Meter()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(meter: Meter, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        backward_and_step(loss, opt)
        meter.update(loss.item(), len(x))
        return loss.detach()

    objects = {"model": module, "opt": opt, "meter": lambda: [*vars(meter).values()]}
    return Job(step=lambda x, y: step(meter, x, y), batches=class_batches(run, 5), objects=objects)
