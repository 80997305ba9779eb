"""Cases about where the step finds its models: arguments, `self`, closures, globals, containers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    CLASSES,
    FEATURES,
    batch_norm_net,
    class_batches,
    loss_of,
    mlp,
    sgd,
    usual_job,
)
from tests.harness.training import backward_and_step

registry = Registry()
case = registry.add


@case()
def found_in_arguments(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(model, x, y), opt)

    return Job(
        step=lambda x, y: step(model, opt, x, y),
        batches=class_batches(run),
        objects={"model": module, "opt": opt},
    )


@case()
def found_in_keyword_arguments(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, *, targets: Tensor, training: dict[str, Any], scale: float = 1.0) -> Tensor:
        return backward_and_step(scale * loss_of(training["model"], x, targets), training["opt"])

    return Job(
        step=lambda x, y: step(x, targets=y, training={"model": model, "opt": opt}, scale=0.5),
        batches=class_batches(run),
        objects={"model": module, "opt": opt},
    )


def trainer_class(run: Run) -> type:
    """A trainer whose step is a decorated method."""

    class Trainer:
        def __init__(self) -> None:
            self.module = mlp()
            self.model = run.model(self.module)
            self.opt = sgd(self.module)
            self.smoothing = 0.1

        @run.compile
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(self.model(x), y, label_smoothing=self.smoothing)
            return backward_and_step(loss, self.opt)

    return Trainer


@case()
def found_in_self(run: Run) -> Job:
    trainer = trainer_class(run)()
    return Job(step=trainer.step, batches=class_batches(run), objects={"model": trainer.module, "opt": trainer.opt})


@case(traces=(1, 2))
def two_trainers_of_one_class(run: Run) -> Job:
    """One decorated method, two instances: each call works on its own parameters."""
    first, second = trainer_class(run)(), trainer_class(run)()

    def both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return first.step(x, y), second.step(x.flip(0), y.flip(0))

    objects = {"first": first.module, "opt": first.opt, "second": second.module, "other_opt": second.opt}
    return Job(step=both, batches=class_batches(run), objects=objects)


@case()
def bound_method_compiled(run: Run) -> Job:
    """`compile` is given a bound method of an ordinary class."""

    class Trainer:
        def __init__(self) -> None:
            self.module = mlp()
            self.model, self.opt = run.model(self.module), sgd(self.module)

        def step(self, x: Tensor, y: Tensor) -> Tensor:
            return backward_and_step(loss_of(self.model, x, y), self.opt)

    trainer = Trainer()
    step = run.compile(trainer.step)
    return Job(step=step, batches=class_batches(run), objects={"model": trainer.module, "opt": trainer.opt})


WORLD = SimpleNamespace()


def step_on_globals(x: Tensor, y: Tensor) -> Tensor:
    return backward_and_step(loss_of(WORLD.model, x, y), WORLD.opt)


@case()
def found_in_globals(run: Run) -> Job:
    module = mlp()
    WORLD.model, WORLD.opt = run.model(module), sgd(module)
    return Job(
        step=run.compile(step_on_globals), batches=class_batches(run), objects={"model": module, "opt": WORLD.opt}
    )


MODEL: Any = None
OPTIMIZER: Any = None
SCALE = 1.0


def helper_on_globals(x: Tensor, y: Tensor) -> Tensor:
    return SCALE * loss_of(MODEL, x, y)


def step_through_a_helper(x: Tensor, y: Tensor) -> Tensor:
    return backward_and_step(helper_on_globals(x, y), OPTIMIZER)


@case(traces=(2,))
def global_changed(run: Run) -> Job:
    """A Python number that a helper reads from its module's globals is doubled after the second call."""
    global MODEL, OPTIMIZER, SCALE
    module = mlp()
    MODEL, OPTIMIZER, SCALE = run.model(module), sgd(module), 1.0

    def between(call: int) -> None:
        global SCALE
        SCALE = 2.0 if call >= 1 else SCALE

    objects = {"model": module, "opt": OPTIMIZER}
    step = run.compile(step_through_a_helper)
    return Job(step=step, batches=class_batches(run, 4), objects=objects, between=between)


@case()
def models_in_containers(run: Run) -> Job:
    """Several models and optimizers in lists and dictionaries of the closure."""
    modules = {"a": mlp(), "b": mlp()}
    models = {name: run.model(module) for name, module in modules.items()}
    opts = [sgd(module) for module in modules.values()]

    @run.compile
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        losses = [loss_of(model, x, y) for model in models.values()]
        torch.stack(losses).sum().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        return losses

    return Job(step=step, batches=class_batches(run), objects={**modules, "opt0": opts[0], "opt1": opts[1]})


@case()
def parameters_in_a_list(run: Run) -> Job:
    """The closure holds the parameters themselves beside the module."""
    module = mlp()
    model, params = run.model(module), list(module.parameters())

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        with torch.no_grad():
            for param in params:
                assert param.grad is not None
                param -= 0.1 * param.grad
                param.grad = None
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module})


@case(ranks=False)  # there is no module for DistributedDataParallel to wrap
def parameters_without_module(run: Run) -> Job:
    weight = nn.Parameter(torch.randn(FEATURES, CLASSES))
    opt = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(nn.functional.cross_entropy(x @ weight, y), opt)

    return Job(step=step, batches=class_batches(run), objects={"weight": weight, "opt": opt})


@case()
def ranks_start_differently(run: Run) -> Job:
    """Every rank draws its own initial values: rank 0's parameters and buffers hold for all."""
    torch.manual_seed(50 + run.rank)
    module = batch_norm_net()
    module[1].running_mean.fill_(run.rank)
    return usual_job(run, module)
