"""Cases about what a step returns and writes beside the update: results, evaluation, clipping, averages, inputs."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer, swa_utils

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import add_step, batch_norm_net, class_batches, loss_of, mlp, sgd, step_job, usual_job
from tests.harness.training import backward_and_step

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)


class Named(NamedTuple):
    loss: Tensor
    logits: Tensor


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    note: str


def returning(run: Run, make: Any) -> Job:
    """The usual step, returning ``make(loss, logits, x, module)``."""
    module = mlp()

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> object:
        logits = model(x)
        return make(backward_and_step(F.cross_entropy(logits, y), opt), logits, x, module)

    return step_job(run, step, module)


RETURNS = {
    "nothing": lambda loss, logits, x, module: None,
    "tuple": lambda loss, logits, x, module: (loss, logits),
    "one_tuple": lambda loss, logits, x, module: (loss,),
    "dict": lambda loss, logits, x, module: {"loss": loss, "logits": logits},
    "ordered_dict": lambda loss, logits, x, module: OrderedDict(b=loss, a=logits),
    "named_tuple": lambda loss, logits, x, module: Named(loss, logits),
    "dataclass": lambda loss, logits, x, module: Result(loss=loss, logits=logits, note="fine"),
    "nested": lambda loss, logits, x, module: {"out": [loss, {"deep": (logits, None)}], "empty": [], "none": None},
    "constants": lambda loss, logits, x, module: {"loss": loss, "rows": len(x), "name": "train", "on": True, "f": 0.5},
    "twice": lambda loss, logits, x, module: (loss, loss, loss.detach()),
    "its_input": lambda loss, logits, x, module: (x, loss),
    "a_parameter": lambda loss, logits, x, module: module[0].weight,
    "views": lambda loss, logits, x, module: (logits[0], logits.t(), logits.argmax(-1)),
    "dataclass_in_dict": lambda loss, logits, x, module: {"result": Result(loss=loss, logits=logits, note="")},
}
for _name, _make in RETURNS.items():
    case(name=f"returns_{_name}")(lambda run, make=_make: returning(run, make))


@case()
def returns_item(run: Run) -> Job:
    """``.item()`` gives a fresh Python float at every call."""
    return returning(run, lambda loss, logits, x, module: loss.item())


@case()
def returns_items_and_arithmetic(run: Run) -> Job:
    return returning(
        run,
        lambda loss, logits, x, module: {
            "loss": loss.item(),
            "double": 2 * loss.item() + 1,
            "right": logits.argmax(-1).eq(0).sum().item(),
        },
    )


@case()
def returns_the_rate(run: Run) -> Job:
    """A number of a parameter group, for a log: that of the call, not of the first one."""
    module = mlp()
    opt = sgd(module)

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, float, float]:
        loss = backward_and_step(loss_of(model, x, y), opt)
        return loss, opt.param_groups[0]["lr"], opt.param_groups[0]["lr"] * loss.item()

    def between(call: int) -> None:
        opt.param_groups[0]["lr"] *= 0.5

    return step_job(run, step, module, optimizer=lambda _: opt, between=between)


def returning_gradients(
    run: Run, train: Callable[[nn.Module, Tensor], list[Tensor]], *, drops_one: bool = False
) -> Job:
    """``train(module, loss)`` gives gradients; between calls some are replaced by others. Where `drops_one`, one is
    None before the last call."""
    module = mlp()
    model = run.model(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        return train(module, loss_of(model, x, y))

    def same_objects() -> list[bool]:
        return [param.grad is one for param, one in zip(module.parameters(), last, strict=False)]

    last: list[Tensor] = []

    def call(x: Tensor, y: Tensor) -> list[Tensor]:
        last[:] = step(x, y)
        return [one.clone() for one in last]

    def between(number: int) -> None:
        for param in list(module.parameters())[number % 2 :]:
            assert param.grad is not None
            param.grad = param.grad.clone().mul_(0.5)
        if drops_one and number == 3:
            module[0].weight.grad = None

    for param in module.parameters():
        param.grad = torch.ones_like(param)
    objects = {"model": module, "same": same_objects}
    return Job(step=call, batches=class_batches(run, 5), objects=objects, between=between)


@case()
def returns_gradients_that_stay(run: Run) -> Job:
    """Those of this call, which are the tensors that parameters had before it."""

    def train(module: nn.Module, loss: Tensor) -> list[Tensor]:
        loss.backward()
        return [param.grad for param in module.parameters() if param.grad is not None]

    return returning_gradients(run, train)


@case()
def returns_gradients_from_before(run: Run) -> Job:
    """The last call's, which nothing else in the step reads, while parameters get new ones."""
    return returning_gradients(run, train_and_give_gradients_from_before)


@case(traces=(2,))
def returns_gradients_from_before_but_one(run: Run) -> Job:
    """Whether there is one is looked at, although nothing reads it."""
    return returning_gradients(run, train_and_give_gradients_from_before, drops_one=True)


def train_and_give_gradients_from_before(module: nn.Module, loss: Tensor) -> list[Tensor]:
    before = [param.grad for param in module.parameters() if param.grad is not None]
    module.zero_grad()
    loss.backward()
    return before


@case(traces=(2,))
def evaluation_no_grad(run: Run) -> Job:
    """Training and evaluation are two compiled functions over one model; training is called first."""
    return train_and_evaluate(run, torch.no_grad, batch_norm_net())


@case(traces=(2,))
def evaluation_inference_mode(run: Run) -> Job:
    return train_and_evaluate(run, torch.inference_mode, mlp(dropout=0.3))


def train_and_evaluate(run: Run, mode: Any, module: nn.Module) -> Job:
    model, opt = run.model(module), sgd(module)

    @run.compile
    def train(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(model, x, y), opt)

    @run.compile
    def evaluate(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        with mode():
            logits = model(x)
            return {"loss": F.cross_entropy(logits, y), "right": (logits.argmax(-1) == y).sum()}

    def both(x: Tensor, y: Tensor) -> tuple[object, ...]:
        module.train()
        trained = train(x, y)
        module.eval()
        return trained, evaluate(x, y)

    return Job(step=both, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(1,))
def evaluation_decorated(run: Run) -> Job:
    module = mlp().eval()
    model = run.model(module)

    @run.compile
    @torch.no_grad()
    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(model, x, y)

    return Job(step=evaluate, batches=class_batches(run), objects={"model": module})


@case(traces=(2,))
def caller_turns_grad_off(run: Run) -> Job:
    """The caller's grad mode is part of what the step means."""

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        return backward_and_step(loss, opt) if torch.is_grad_enabled() else loss

    job, calls = step_job(run, step, mlp(), batches=class_batches(run, 4)), count(1)

    def caller(x: Tensor, y: Tensor) -> object:
        with torch.set_grad_enabled(next(calls) % 2 == 1):
            return job.step(x, y)

    return replace(job, step=caller)


def clipping(run: Run, clip: Any) -> Job:
    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> tuple[object, ...]:
        loss = loss_of(model, x, y)
        loss.backward()
        norm = clip(model.parameters())
        opt.step()
        opt.zero_grad()
        return loss, norm

    return step_job(run, step, mlp())


CLIPS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.1),
    "norm_not_reached": lambda params: nn.utils.clip_grad_norm_(params, 1e6),
    "norm_single_tensor": lambda params: nn.utils.clip_grad_norm_(params, 0.1, foreach=False),
    "norm_inf": lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=float("inf")),
    "norm_one": lambda params: nn.utils.clip_grad_norm_(params, 0.1, norm_type=1.0),
    "value": lambda params: nn.utils.clip_grad_value_(params, 0.05),
    "value_single_tensor": lambda params: nn.utils.clip_grad_value_(params, 0.05, foreach=False),
}
for _name, _clip in CLIPS.items():
    case(name=f"clip_{_name}")(lambda run, clip=_clip: clipping(run, clip))


@case()
def weight_ema(run: Run) -> Job:
    """A moving average of the weights, kept in a copy of the module and written inside the step."""
    module = mlp()
    average = copy.deepcopy(module).requires_grad_(False)

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        with torch.no_grad():
            for mean, param in zip(average.parameters(), module.parameters(), strict=True):
                mean.lerp_(param, 0.1)
        return loss

    return step_job(run, step, module, average=average)


def averaged_model(run: Run, options: dict[str, Any]) -> Job:
    """Its counter decides whether weights are copied or averaged, so the second call is one retrace."""
    module = mlp()
    with torch.device("cpu"):  # where its counter is, unless somebody says where it is to be
        average = swa_utils.AveragedModel(module, **options)

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        average.update_parameters(module)
        return loss

    return step_job(run, step, module, average=average)


AVERAGES: dict[str, dict[str, Any]] = {
    "exponential": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "stochastic": {},
    "one_by_one": {"avg_fn": lambda mean, param, count: mean + (param - mean) / (count + 1)},
}
for _name, _options in AVERAGES.items():
    case(name=f"averaged_model_{_name}", traces=(2,))(lambda run, options=_options: averaged_model(run, options))


@case()
def input_written_in_the_step(run: Run) -> Job:
    """The caller's own batch tensor changes, as it does eagerly."""
    return usual_job(run, mlp(), loss=lambda model, x, y: loss_of(model, x.mul_(0.5), y))


@case()
def loose_tensor_written(run: Run) -> Job:
    """A tensor of the closure that belongs to no module."""
    module, total = mlp(), torch.zeros(())

    def step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        with torch.no_grad():
            total.add_(loss)
        return loss

    return step_job(run, step, module, total=total)
