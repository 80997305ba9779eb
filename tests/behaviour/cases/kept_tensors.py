"""Cases about tensors that a step leaves in objects of the user's, where it does not return them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import FEATURES, class_batches, loss_of, mlp, sgd
from tests.harness.training import backward_and_step

registry = Registry()
case = partial(registry.add, live=True)


class Trainer:
    """Keeps what it saw last."""

    def __init__(self, model: Any, opt: torch.optim.Optimizer) -> None:
        self.model, self.opt = model, opt
        self.last: Tensor | None = None
        self.logits: dict[str, Any] = {}

    def step(self, x: Tensor, y: Tensor) -> float:
        logits = self.model(x)
        loss = F.cross_entropy(logits, y)
        backward_and_step(loss, self.opt)
        self.last = loss.detach()
        self.logits["now"] = logits.detach()
        return loss.item()


class Holder:
    """Whatever a step keeps."""

    def __init__(self) -> None:
        self.logs: Any = None
        self.count = 0


class WithSlots:
    __slots__ = ("batch", "last")

    def __init__(self) -> None:
        self.last: Tensor | None = None


def leaving(
    run: Run, step: Callable[..., Any], seen: Callable[[], Any], module: nn.Module, opt: Any, **more: Any
) -> Job:
    """A job that records what `seen` gives after every call, and what it gave after all calls before."""
    compiled, kept = run.compile(step), list[Any]()

    def call(x: Tensor, y: Tensor) -> Any:
        result = compiled(x, y)
        kept.append(seen())
        return result

    objects = {"model": module, "opt": opt, "kept": lambda: [*kept]}
    return Job(step=call, batches=class_batches(run, 5), objects=objects, **more)


@case()
def leaves_attributes(run: Run) -> Job:
    """None at first, and then a new tensor after every call."""
    module = mlp()
    trainer = Trainer(run.model(module), sgd(module))
    return leaving(run, trainer.step, lambda: (trainer.last, trainer.logits["now"]), module, trainer.opt)


@case()
def leaves_what_hooks_keep(run: Run) -> Job:
    module, seen = mlp(), dict[str, Tensor]()
    module[0].register_forward_hook(lambda part, args, out: seen.__setitem__("first", out.detach()))
    module[1].register_forward_hook(lambda part, args, out: seen.update(second=out))
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(model, x, y) + seen["second"].square().mean(), opt)

    return leaving(run, step, lambda: (seen["first"], seen["second"].detach()), module, opt)


class Expert(nn.Module):
    """Leaves a loss of its own where the step finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.loss = out.square().mean()
        return x + out


@case()
def leaves_losses_on_modules(run: Run) -> Job:
    module = nn.Sequential(Expert(), Expert(), mlp())
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        for part in module:
            if isinstance(part, Expert):
                loss = loss + 0.1 * part.loss
        return backward_and_step(loss, opt)

    return leaving(run, step, lambda: [part.loss.detach() for part in module[:2]], module, opt)


def leaving_in(run: Run, keep: Callable[[Tensor, Tensor], Any], seen: Callable[[], Any]) -> Job:
    """``keep(loss, x)`` leaves something at the end of the usual step, and gives its result."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = loss_of(model, x, y)
        backward_and_step(loss, opt)
        return keep(loss.detach(), x)

    return leaving(run, step, seen, module, opt)


def keeps(
    seen: Callable[[Any], Any], *, held: Callable[[], Any] = Holder, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers ``keep(held, loss, x)``, the end of the usual step; it leaves in `held` what ``seen(held)`` gives."""

    def register(keep: Callable[..., Any]) -> Callable[..., Any]:
        def build(run: Run) -> Job:
            kept = held()
            return leaving_in(run, lambda loss, x: keep(kept, loss, x), lambda: seen(kept))

        case(name=keep.__name__, **options)(build)
        return keep

    return register


@keeps(
    lambda held: (held.last, held.batch),
    held=WithSlots,
)
def leaves_slots_and_an_argument(held: Any, loss: Tensor, x: Tensor) -> None:
    held.last, held.batch = loss, x


@case()
def leaves_a_variable(run: Run) -> Job:
    last: Tensor | None = None

    def keep(loss: Tensor, x: Tensor) -> None:
        nonlocal last
        last = loss * 2

    return leaving_in(run, keep, lambda: last)


@keeps(
    lambda held: held[1],
    held=lambda: ["name", None],
)
def leaves_an_item_of_a_list(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    held[1] = loss
    return loss + 1


@keeps(
    lambda held: float(held["last"]),
    held=lambda: {"last": None},
)
def leaves_it_and_returns_the_one_before(held: Any, loss: Tensor, x: Tensor) -> Any:
    """What is returned is not what is written to."""
    before, held["last"] = held["last"], loss
    return before


@keeps(
    lambda held: [None if one is None else float(one) for one in held.values()],
    held=lambda: {},
)
def leaves_it_and_keeps_the_one_before(held: Any, loss: Tensor, x: Tensor) -> None:
    held["before"] = held.get("last")
    held["last"] = loss


@keeps(
    lambda held: float(held["mean"]),
    held=lambda: {"mean": None},
)
def leaves_an_average(held: Any, loss: Tensor, x: Tensor) -> None:
    """It is read before it is replaced: state from the second call on."""
    held["mean"] = loss if held["mean"] is None else 0.9 * held["mean"] + 0.1 * loss


@case()
def leaves_tensors_of_two_sizes(run: Run) -> Job:
    """Nothing at first, and then what the call before has left is of either size, too."""
    module = mlp()
    trainer = Trainer(run.model(module), sgd(module))
    job = leaving(run, trainer.step, lambda: trainer.logits["now"], module, trainer.opt)
    batches = [
        (x[:size], y[:size]) for (x, y), size in zip(class_batches(run, 8), [5, 5, 3, 3, 5, 5, 3, 3], strict=True)
    ]
    return Job(step=job.step, batches=batches, objects=job.objects)


@case()
def leaves_it_where_its_owner_has_put_another(run: Run) -> Job:
    """Between two calls: neither is it looked at, nor written to."""
    module, others = mlp(), [torch.full((), float(number)) for number in range(5)]
    trainer = Trainer(run.model(module), sgd(module))
    job = leaving(run, trainer.step, lambda: trainer.last, module, trainer.opt)

    def between(call: int) -> None:
        trainer.last = others[call]

    objects = {**job.objects, "others": lambda: others}
    return Job(step=job.step, batches=job.batches, objects=objects, between=between)


@keeps(
    lambda held: [*held.logs.items()],
)
def leaves_a_dict_of_tensors(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    """A new one in every call, in which nobody looks before."""
    held.logs = {"loss": loss, "parts": (loss + 1, x), "name": "step"}
    return loss


@keeps(
    lambda held: [*held.logs.values()],
)
def leaves_a_dict_of_numbers(held: Any, loss: Tensor, x: Tensor) -> None:
    held.logs = {"loss": loss.item(), "tensor": loss}


@keeps(
    lambda held: held.logs,
)
def leaves_a_number_where_none_was(held: Any, loss: Tensor, x: Tensor) -> None:
    held.logs = loss.item()


@keeps(
    lambda held: (held.count, held.logs),
)
def leaves_the_answer_to_a_number(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    """As accelerate notes whether gradients are complete in this call."""
    held.count += 1
    held.logs = held.count % 2 == 0
    return loss * 2 if held.logs else loss


@keeps(
    lambda held: (held.logs.mean, held.logs.stddev),
)
def leaves_an_object_of_tensors(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    held.logs = torch.distributions.Normal(loss, loss.abs() + 1)
    return loss


@keeps(
    lambda held: held.logs["mean"],
)
def leaves_a_dict_that_it_reads(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    """What is read is a constant of its trace."""
    held.logs = {"mean": loss if held.logs is None else 0.5 * (held.logs["mean"] + loss)}
    return loss


@keeps(
    lambda held: held.logs["calls"],
)
def leaves_a_dict_that_it_counts_in(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    held.logs = {"calls": 1 if held.logs is None else held.logs["calls"] + 1}
    return loss * held.logs["calls"]


@case()
def leaves_a_dict_that_others_put_away(run: Run) -> Job:
    """None again between some calls, which the step sees."""
    held, module = Holder(), mlp()
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y) * (1 if held.logs is None else 2)
        backward_and_step(loss, opt)
        held.logs = {"loss": loss.detach()}
        return loss.detach()

    seen: list[Any] = []

    def look() -> Any:
        found = held.logs["loss"]
        seen.append(found)
        if len(seen) % 3 == 0:
            held.logs = None
        return found

    return leaving(run, step, look, module, opt)


@case()
def switches_its_module(run: Run) -> Job:
    """Which eager code would find switched in its next call, too."""
    module = nn.Sequential(mlp(), nn.Dropout(0.5))
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        backward_and_step(loss, opt)
        module.eval()
        return loss.detach()

    return leaving(run, step, lambda: [part.training for part in module.modules()], module, opt)


@keeps(
    lambda held: held.logs["loss"],
)
def leaves_a_dict_and_asks_for_its_class(held: Any, loss: Tensor, x: Tensor) -> Tensor:
    """Which nothing that stands in its place can notice, but the program is another one then."""
    loss = loss * 2 if type(held.logs) is dict else loss
    held.logs = {"loss": loss}
    return loss
