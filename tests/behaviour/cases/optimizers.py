"""Cases about optimizers and schedulers: every optimizer with a fixed update rule, every scheduler outside the step.

Rates change at every call in each of them, so a rate that a trace has frozen cannot go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import FEATURES, HIDDEN, class_batches, loss_of, mlp, step_job, usual_job
from tests.harness.training import backward_and_step

registry = Registry()
case = registry.add

SINGLE: dict[str, Any] = {"foreach": False}
FOREACH: dict[str, Any] = {"foreach": True}
FUSED: dict[str, Any] = {"fused": True}
DECAY: dict[str, Any] = {"weight_decay": 0.1}

Maker = Callable[..., torch.optim.Optimizer]

ALL_WAYS, WITHOUT_FUSED = ("single", "foreach", "fused"), ("single", "foreach")
# name -> (class, options, variants). A variant is a way to run the same rule.
OPTIMIZERS: dict[str, tuple[Maker, dict[str, Any], tuple[str, ...]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, ALL_WAYS),
    "sgd_decay": (torch.optim.SGD, {"lr": 0.1, **DECAY}, ALL_WAYS),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ALL_WAYS),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, **DECAY}, ALL_WAYS),
    "sgd_dampening": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, ALL_WAYS),
    "sgd_maximize": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "maximize": True}, ALL_WAYS),
    "adam": (torch.optim.Adam, {"lr": 0.01}, ALL_WAYS),
    "adam_decay": (torch.optim.Adam, {"lr": 0.01, **DECAY}, ALL_WAYS),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, ALL_WAYS),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}, ALL_WAYS),
    "adamw_amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}, ALL_WAYS),
    "adamax": (torch.optim.Adamax, {"lr": 0.01, **DECAY}, WITHOUT_FUSED),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}, WITHOUT_FUSED),
    "nadam_decoupled": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, **DECAY}, WITHOUT_FUSED),
    "radam": (torch.optim.RAdam, {"lr": 0.01}, WITHOUT_FUSED),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, ALL_WAYS),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}, WITHOUT_FUSED),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, WITHOUT_FUSED),
    "rmsprop_momentum": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9}, WITHOUT_FUSED),
    "rmsprop_centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, **DECAY}, WITHOUT_FUSED),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}, WITHOUT_FUSED),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 1e-2}, WITHOUT_FUSED),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}, WITHOUT_FUSED),
    "muon": (torch.optim.Muon, {"lr": 0.01}, ("default",)),
}

CALLS = {"radam": 9, "asgd": 6}
"""RAdam takes another branch at its sixth update; ASGD averages after ``t0``."""

MAY_RETRACE = {"radam", "asgd", "adafactor", "sgd_dampening"}
"""Rules that read their own step counter, or that begin in another way than they go on."""

VARIANTS = {"single": SINGLE, "foreach": FOREACH, "fused": FUSED, "default": {}}


def body(only_matrices: bool = False) -> nn.Module:
    """An MLP; with matrices only for the optimizers that refuse vectors."""
    if not only_matrices:
        return mlp()
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, 3, bias=False))


def training(
    run: Run,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    schedule: Callable[[torch.optim.Optimizer], Callable[[Any], object]],
    *,
    module: nn.Module,
    calls: int = 4,
) -> Job:
    """The usual step; ``schedule(opt)`` gives what is called after each step with the loss it returned."""
    job = usual_job(run, module, optimizer=make, calls=calls)
    advance, last = schedule(job.objects["opt"]), list[Any]()  # type: ignore[arg-type]

    def remembering(x: Tensor, y: Tensor) -> object:
        last[:] = [job.step(x, y)]
        return last[0]

    return replace(job, step=remembering, between=lambda call: advance(last[0]))


def falling(opt: torch.optim.Optimizer) -> Callable[[Any], object]:
    scheduler = schedules.LambdaLR(opt, lambda call: 1.0 / (1 + call))
    return lambda loss: scheduler.step()


def optimizer_job(run: Run, name: str, variant: str) -> Job:
    make, options, _ = OPTIMIZERS[name]
    options = {**options, **VARIANTS[variant]}
    module = body(only_matrices=name == "muon")
    calls = CALLS.get(name, 4)
    return training(run, lambda one: make(one.parameters(), **options), falling, module=module, calls=calls)


for _name, (_, _, _variants) in OPTIMIZERS.items():
    for _variant in _variants:
        case(name=f"{_name}_{_variant}", traces=() if _name in MAY_RETRACE else (1,))(
            partial(optimizer_job, name=_name, variant=_variant)
        )


def several_updates(run: Run, name: str) -> Job:
    """Three updates in a call, by kernels over lists, each with the step counter of its own."""
    make, options, _ = OPTIMIZERS[name]

    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        for number in range(3):
            opt.zero_grad()
            loss = loss_of(model, x + number, y)
            loss.backward()
            opt.step()
        opt.zero_grad()
        return loss

    return step_job(run, step, body(), optimizer=lambda module: make(module.parameters(), **options, **FOREACH))


for _name, (_, _, _variants) in OPTIMIZERS.items():
    if "foreach" in _variants:
        case(name=f"{_name}_several_updates", traces=(), ranks=_name == "adam")(partial(several_updates, name=_name))


@case()
def rate_read_next_to_a_fused_update(run: Run) -> Job:
    """Fused kernels take no symbolic numbers; what else reads the group does, and follows the scheduler."""
    module = body()
    opt = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
    scheduler = schedules.ExponentialLR(opt, 0.5)

    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        loss = backward_and_step(loss_of(model, x, y), opt)
        rate = opt.param_groups[0]["lr"]
        with torch.no_grad():
            for one in module.parameters():
                one.mul_(1 - rate * 0.1)
        return loss * rate, rate

    batches = class_batches(run, 4)
    return step_job(run, step, module, optimizer=lambda _: opt, batches=batches, between=lambda call: scheduler.step())


def with_closure(run: Run, make: Maker, by_name: bool) -> Job:
    """Forward and backward are in a closure, which the optimizer calls: gradients are not there before."""

    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        return opt.step(closure=closure) if by_name else opt.step(closure)  # type: ignore[no-any-return]

    batches = class_batches(run, 4)
    return step_job(run, step, body(), optimizer=lambda module: make(module.parameters()), batches=batches)


case(name="closure_sgd", traces=(2,))(
    partial(with_closure, make=partial(torch.optim.SGD, lr=0.1, momentum=0.9), by_name=False)
)
case(name="closure_adamw", traces=(2,))(partial(with_closure, make=partial(torch.optim.AdamW, lr=0.01), by_name=True))


@case()
def rate_as_tensor(run: Run) -> Job:
    """The rate is a tensor that the scheduler fills in place."""
    optimizer = lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.01))  # noqa: E731
    return training(run, optimizer, falling, module=body())


def outside(make: Callable[..., Any], **options: Any) -> Callable[[torch.optim.Optimizer], Callable[[Any], object]]:
    """A scheduler that steps after the call, without an argument."""

    def schedule(opt: torch.optim.Optimizer) -> Callable[[Any], object]:
        scheduler = make(opt, **options)
        return lambda loss: scheduler.step()

    return schedule


def plateau(opt: torch.optim.Optimizer) -> Callable[[Any], object]:
    # The measured value gets worse at every call, so the rate falls on every rank alike.
    scheduler, values = schedules.ReduceLROnPlateau(opt, factor=0.5, patience=0), iter(range(100))
    return lambda loss: scheduler.step(float(next(values)))


def chained(opt: torch.optim.Optimizer) -> Callable[[Any], object]:
    parts = [schedules.ConstantLR(opt, factor=0.5, total_iters=2), schedules.ExponentialLR(opt, gamma=0.9)]
    scheduler = schedules.ChainedScheduler(parts)
    return lambda loss: scheduler.step()


def sequential(opt: torch.optim.Optimizer) -> Callable[[Any], object]:
    parts = [schedules.LinearLR(opt, start_factor=0.1, total_iters=2), schedules.CosineAnnealingLR(opt, T_max=4)]
    scheduler = schedules.SequentialLR(opt, schedulers=parts, milestones=[2])
    return lambda loss: scheduler.step()


SCHEDULES = {
    "lambda": outside(schedules.LambdaLR, lr_lambda=lambda call: 0.9**call),
    "multiplicative": outside(schedules.MultiplicativeLR, lr_lambda=lambda call: 0.9),
    "step": outside(schedules.StepLR, step_size=2, gamma=0.5),
    "multi_step": outside(schedules.MultiStepLR, milestones=[1, 3], gamma=0.5),
    "constant": outside(schedules.ConstantLR, factor=0.5, total_iters=2),
    "linear": outside(schedules.LinearLR, start_factor=0.5, total_iters=4),
    "exponential": outside(schedules.ExponentialLR, gamma=0.9),
    "polynomial": outside(schedules.PolynomialLR, total_iters=5, power=2.0),
    "cosine": outside(schedules.CosineAnnealingLR, T_max=5),
    "warm_restarts": outside(schedules.CosineAnnealingWarmRestarts, T_0=2),
    "cyclic": outside(schedules.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    "one_cycle": outside(schedules.OneCycleLR, max_lr=0.1, total_steps=8),
    "plateau": plateau,
    "chained": chained,
    "sequential": sequential,
}

SCHEDULED: dict[str, Maker] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
}


def schedule_job(run: Run, name: str, optimizer: str) -> Job:
    make = SCHEDULED[optimizer]
    return training(run, lambda module: make(module.parameters()), SCHEDULES[name], module=body(), calls=5)


# Cyclic and OneCycle move SGD's momentum and Adam's first beta with the rate: one trace all the same.
for _name in SCHEDULES:
    case(name=f"schedule_{_name}_sgd")(partial(schedule_job, name=_name, optimizer="sgd"))
for _name in ("lambda", "cosine", "one_cycle", "sequential"):
    case(name=f"schedule_{_name}_adamw")(partial(schedule_job, name=_name, optimizer="adamw"))


@case()
def several_groups_scheduled(run: Run) -> Job:
    """Every group has its own rate and its own schedule."""

    def make(module: nn.Module) -> torch.optim.Optimizer:
        weights = {"params": [p for p in module.parameters() if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1}
        biases = {"params": [p for p in module.parameters() if p.ndim == 1], "lr": 0.05, "weight_decay": 0.0}
        return torch.optim.AdamW([weights, biases])

    return training(
        run,
        make,
        outside(schedules.LambdaLR, lr_lambda=[lambda call: 0.9**call, lambda call: 0.5**call]),
        module=body(),
    )
