"""Cases about tensors that a step reads and then replaces: averages, counters, what was there before.

Whoever has kept one between two calls has its values, as in eager code, where each is a new tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.behaviour.cases.kept_tensors import leaving
from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import class_batches, loss_of, mlp, sgd
from tests.harness.training import backward_and_step

registry = Registry()
case = partial(registry.add, live=True)

Between = Callable[[int, Any], object]


class Holder:
    """What a step keeps."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def seen(self) -> list[Any]:
        return list(vars(self).values())


class WithSlots(Holder):
    __slots__ = ("mean",)

    def __init__(self, mean: Tensor) -> None:
        self.mean = mean

    def seen(self) -> list[Any]:
        return [self.mean]


def replacing(
    run: Run, keep: Callable[[Any, Tensor], Any], held: Any, between: Between | None = None, **seen: Any
) -> Job:
    """The usual step, with ``keep(held, loss)`` at its end, whose result it returns beside the loss."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = backward_and_step(loss_of(model, x, y), opt)
        return loss.detach(), keep(held, loss.detach())

    more: dict[str, Any] = {} if between is None else {"between": lambda call: between(call, held)}
    return leaving(run, step, seen.get("seen", getattr(held, "seen", None)), module, opt, **more)


def replaces(held: Callable[[], Any], **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``keep(held, loss)``, the end of the usual step, which replaces tensors in `held`."""

    def register(keep: Callable[..., Any]) -> Callable[..., Any]:
        case(name=keep.__name__, **options)(lambda run: replacing(run, keep, held()))
        return keep

    return register


def average(held: Any, loss: Tensor) -> None:
    held.mean = 0.9 * held.mean + 0.1 * loss


def mean() -> Holder:
    return Holder(mean=torch.zeros(()))


@case()
def replaces_an_average(run: Run) -> Job:
    return replacing(run, average, mean())


@case()
def replaces_a_slot(run: Run) -> Job:
    return replacing(run, average, WithSlots(torch.zeros(())))


@case()
def replaces_a_variable(run: Run) -> Job:
    total, count = torch.zeros(3), torch.zeros((), dtype=torch.int64)

    def keep(held: Any, loss: Tensor) -> Tensor:
        nonlocal total, count
        total, count = total + loss * torch.arange(3.0, device=loss.device), count + 1
        return total / count

    return replacing(run, keep, None, seen=lambda: [total, count])


@case()
def replaces_items_of_dicts_and_lists(run: Run) -> Job:
    sums, extremes = {"loss": torch.zeros(()), "square": torch.zeros(())}, [torch.zeros(()), torch.ones(())]

    def keep(held: Any, loss: Tensor) -> None:
        sums["loss"], sums["square"] = sums["loss"] + loss, sums["square"] + loss * loss
        extremes[0], extremes[1] = torch.maximum(extremes[0], loss), torch.minimum(extremes[1], loss)

    return replacing(run, keep, None, seen=lambda: [*sums.values(), *extremes])


@replaces(lambda: Holder(table=torch.ones(3, 4).t()))
def replaces_what_lies_by_columns(held: Any, loss: Tensor) -> None:
    held.table = held.table * 0.5 + loss


@replaces(mean)
def replaces_and_returns_both(held: Any, loss: Tensor) -> Any:
    before = held.mean
    average(held, loss)
    return before, held.mean


@replaces(lambda: Holder(before=torch.ones(()), mean=torch.zeros(())))
def replaces_and_moves_the_one_before(held: Any, loss: Tensor) -> None:
    held.before, held.mean = held.mean, 0.9 * held.mean + 0.1 * loss + held.before


@replaces(lambda: Holder(a=torch.ones(()), b=torch.zeros(())))
def replaces_two_by_each_other(held: Any, loss: Tensor) -> Tensor:
    held.a, held.b = held.b, held.a
    return held.a * 2 + held.b


@case()
def replaces_two_that_were_one(run: Run) -> Job:
    """They are several tensors from the second call on."""

    def keep(held: Any, loss: Tensor) -> None:
        held.a, held.b = held.a + loss, held.b + 2 * loss

    zeros = torch.zeros(())
    return replacing(run, keep, Holder(a=zeros, b=zeros))


@case()
def replaces_one_of_two_that_were_one(run: Run) -> Job:
    def keep(held: Any, loss: Tensor) -> Tensor:
        held.mean = 0.9 * held.mean + 0.1 * loss
        return held.start + 3 * loss

    zeros = torch.zeros(())
    return replacing(run, keep, Holder(start=zeros, mean=zeros))


@case()
def replaces_what_stands_in_a_tuple_too(run: Run) -> Job:
    def keep(held: Any, loss: Tensor) -> Tensor:
        held.mean = held.mean + loss
        return held.pair[0][1] + 2 * loss

    zeros = torch.zeros(())
    return replacing(run, keep, Holder(mean=zeros, pair=((1, zeros), "start")), seen=lambda: [zeros])


@case()
def replaces_what_is_an_argument_too(run: Run) -> Job:
    module, held, kept = mlp(), mean(), list[Tensor]()
    model, opt, first = run.model(module), sgd(module), held.mean

    def step(x: Tensor, y: Tensor, start: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        held.mean = held.mean + loss.detach()
        return loss.detach() + start

    return Job(
        step=run.compile(step), batches=[(x, y, first) for x, y in class_batches(run, 4)],
        objects={"model": module, "mean": lambda: held.mean, "kept": lambda: [*kept]},
        between=lambda call: kept.append(held.mean),
    )  # fmt: skip


@case(ranks=False)
def replaces_what_is_a_gradient_too(run: Run) -> Job:
    """Not on ranks, where eager code has other gradients at entry."""
    module = mlp()
    opt = sgd(module)
    bias = module[0].bias
    bias.grad = torch.ones_like(bias)  # type: ignore[union-attr]
    held = Holder(seen=bias.grad)  # type: ignore[union-attr]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        loss.backward()
        opt.step()
        held.seen = held.seen * 0.5 + 1
        return loss.detach()

    return Job(
        step=run.compile(step), batches=class_batches(run, 4),
        objects={"model": module, "opt": opt, "seen": lambda: held.seen},
    )  # fmt: skip


@case(ranks=False)
def replaces_what_an_optimizer_has_too(run: Run) -> Job:
    """Its rate, and the momentum of a parameter. Not on ranks, whose first step would be another one."""
    module = mlp()
    held = Holder(rate=torch.tensor(0.1))
    opt = torch.optim.SGD(module.parameters(), lr=held.rate, momentum=0.9)
    backward_and_step(loss_of(module, *class_batches(run, 1)[0]), opt)
    held.momentum = opt.state[module[0].bias]["momentum_buffer"]  # type: ignore[index]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(module, x, y), opt)
        held.rate, held.momentum = held.rate * 0.5, held.momentum * 0.5 + 1
        return loss.detach()

    return Job(
        step=run.compile(step), batches=class_batches(run, 4),
        objects={"model": module, "opt": opt, "held": held.seen},
    )  # fmt: skip


@case()
def replaces_where_its_owner_has_put_another(run: Run) -> Job:
    def between(call: int, held: Any) -> None:
        if call % 2:
            held.mean = torch.full((), float(call))

    return replacing(run, average, mean(), between)


@case()
def replaces_where_its_owner_has_written(run: Run) -> Job:
    """To what stands there, which counts, and to what stood there before, which does not."""
    old: list[Tensor] = []

    def between(call: int, held: Any) -> None:
        old.append(held.mean)
        old[max(0, call - 1)].add_(100 if call == 2 else 0)
        if call == 3:
            held.mean.zero_()

    return replacing(run, average, mean(), between)


@case()
def reads_what_its_owner_replaces(run: Run) -> Job:
    """A batch in an attribute, in a list, and in a variable."""
    module, batches = mlp(), class_batches(run, 6)
    model, opt, kept = run.model(module), sgd(module), list[Tensor]()
    held, listed, variable = Holder(x=batches[0][0]), [batches[0][1]], torch.zeros(())

    def step(number: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, held.x, listed[0]) * (1 + variable) + number, opt)
        held.before = held.x
        return loss.detach()

    def between(call: int) -> None:
        nonlocal variable
        kept.append(held.before)
        held.x, listed[0] = batches[(call + 1) % 6]
        variable = torch.full((), 0.1 * call)

    objects = {"model": module, "opt": opt, "kept": lambda: [*kept]}
    return Job(step=run.compile(step), batches=[(torch.ones(()),)] * 6, objects=objects, between=between)


@case()
def writes_to_what_its_owner_replaces(run: Run) -> Job:
    """To the tensor that stands there, which somebody else may hold."""
    held, sums = Holder(total=torch.zeros(3)), list[Tensor]()

    def keep(held: Any, loss: Tensor) -> Tensor:
        held.total.add_(loss)
        return held.total * 2

    def between(call: int, held: Any) -> None:
        sums.append(held.total)
        if call != 3:
            held.total = torch.full((3,), float(call))

    return replacing(run, keep, held, between, seen=lambda: [held.total, *sums])


@case()
def reads_what_another_step_replaces(run: Run) -> Job:
    module, held = mlp(), mean()
    model, opt = run.model(module), sgd(module)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        average(held, loss.detach())
        return loss.detach()

    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return loss_of(model, x, y) - held.mean  # type: ignore[no-any-return]

    train_step, evaluate_step = run.compile(train), run.compile(evaluate)
    return Job(
        step=lambda x, y: (train_step(x, y), evaluate_step(x, y)), batches=class_batches(run, 5),
        objects={"model": module, "opt": opt, "mean": lambda: held.mean},
    )  # fmt: skip


@case()
def replaces_by_what_lasts(run: Run) -> Job:
    """What stands in two places from then on is one tensor, to which its owner may write."""

    def keep(held: Any, loss: Tensor) -> Tensor:
        held.mean = held.mean + loss
        found = held.now * 2
        held.now = held.best
        return found

    def between(call: int, held: Any) -> None:
        held.best.add_(1)

    return replacing(run, keep, Holder(mean=torch.zeros(()), now=torch.ones(()), best=torch.zeros(())), between)


@case()
def replaces_in_steps_of_two_sizes(run: Run) -> Job:
    """Each has a graph of its own; what one leaves the other takes up."""
    job = replacing(run, average, mean())
    batches = [
        (x[: 2 + call % 2], y[: 2 + call % 2])  # type: ignore[index]
        for call, (x, y) in enumerate(job.batches)
    ]
    return Job(step=job.step, batches=batches, objects=job.objects)


@case()
def replaces_in_two_steps(run: Run) -> Job:
    """Of training, and of evaluation in inference mode."""
    module, held = mlp(), mean()
    model, opt = run.model(module), sgd(module)

    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        average(held, loss.detach())
        return loss.detach()

    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        average(held, loss)
        return loss

    train_step, evaluate_step = run.compile(train), run.compile(evaluate)

    def both(x: Tensor, y: Tensor) -> Any:
        first = train_step(x, y)
        with torch.inference_mode():
            evaluate_step(x, y)
            second = evaluate_step(x, y)
        held.mean = held.mean.clone()  # nothing of inference mode is left for the training
        return first, second

    kept: list[Tensor] = []
    objects = {"model": module, "opt": opt, "mean": lambda: held.mean, "kept": lambda: [*kept]}
    return Job(step=both, batches=class_batches(run, 4), objects=objects, between=lambda call: kept.append(held.mean))
