"""Cases in which the step itself moves numbers of Python: optimizers that count, schedulers inside, trainers.

A capture runs a step more than once, so it meets calls that are still to come: what only they do may not be left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from tests.behaviour.harness import Job, Registry, Run, recording
from tests.behaviour.small_models import class_batches, loss_of, mlp, sgd, step_job, usual_job
from tests.harness.training import backward_and_step

registry = Registry()
case = partial(registry.add, live=True)


class Adamlike(torch.optim.Optimizer):
    """As libraries write them: ``step`` is an int in the group, other numbers lie in the state."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            size = group["lr"] * math.sqrt(1 - math.pow(beta2, group["step"])) / (1 - beta1 ** group["step"])
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(mean=torch.zeros_like(param), square=torch.zeros_like(param), seen=0, decay=1.0)
                state["seen"] += param.numel()
                state["decay"] *= 0.95
                state["mean"].lerp_(param.grad, 1 - beta1)
                state["square"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                param.addcdiv_(state["mean"], state["square"].sqrt() + 1e-8, value=-size)
                param.mul_(1 - 0.001 * state["decay"] * math.log(1 + state["seen"]))


def numbers(opt: torch.optim.Optimizer) -> Callable[[], object]:
    """What an optimizer holds besides tensors, as text."""

    def read() -> object:
        groups = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
        states = [{k: v for k, v in held.items() if not isinstance(v, Tensor)} for held in opt.state.values()]
        return repr((groups, [sorted(held.items()) for held in states]))

    return read


@case()
def an_optimizer_counts(run: Run) -> Job:
    """Its first call makes the state, the second goes on from there, and so do all others."""
    job = usual_job(run, mlp(), optimizer=lambda module: Adamlike(module.parameters()), calls=5)
    return recording(job, numbers=numbers(job.objects["opt"]))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda opt: lr_scheduler.StepLR(opt, 2, 0.5),
    "cosine": lambda opt: lr_scheduler.CosineAnnealingLR(opt, 4),
    "one_cycle": lambda opt: lr_scheduler.OneCycleLR(opt, 0.3, total_steps=20),
    "lambda": lambda opt: lr_scheduler.LambdaLR(opt, lambda epoch: min(1.0, (epoch + 1) / 3)),
    "exponential": lambda opt: lr_scheduler.ExponentialLR(opt, 0.9),
    "warm_restarts": lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, 3),
    "sequential": lambda opt: lr_scheduler.SequentialLR(
        opt, [lr_scheduler.LinearLR(opt, 0.2, total_iters=2), lr_scheduler.PolynomialLR(opt, 6)], [2]
    ),
}


def scheduled(name: str) -> Callable[[Run], Job]:
    """A step that calls ``scheduler.step()`` itself."""

    def build(run: Run) -> Job:
        module = mlp()
        opt = sgd(module, momentum=0.9)
        scheduler = SCHEDULES[name](opt)

        def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
            loss = loss_of(model, x, y)
            loss.backward()
            opt.step()
            scheduler.step()
            opt.zero_grad()
            return loss

        def held() -> object:
            shown = {key: value for key, value in scheduler.state_dict().items() if key != "_schedulers"}
            return repr((shown, scheduler.get_last_lr(), opt.param_groups[0]["lr"]))

        return step_job(run, step, module, optimizer=lambda _: opt, batches=class_batches(run, 7), scheduler=held)

    build.__name__ = f"{name}_schedule_inside"
    return build


for _name in SCHEDULES:
    case()(scheduled(_name))


@case()
def schedule_of_fused_updates_inside(run: Run) -> Job:
    """Two updates in a call, each at a rate and with betas that the scheduler has just set."""
    module = mlp()
    opt = torch.optim.AdamW(module.parameters(), lr=0.05, fused=True)
    scheduler = SCHEDULES["one_cycle"](opt)

    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        for number in range(2):
            opt.zero_grad()
            loss = loss_of(model, x + number, y)
            loss.backward()
            opt.step()
            scheduler.step()
        opt.zero_grad()
        return loss

    batches = class_batches(run, 5)
    return step_job(run, step, module, optimizer=lambda _: opt, batches=batches, numbers=numbers(opt))


class Trainer:
    """Counts steps and rows, warms up by its own count, and reports each fourth step in another way."""

    def __init__(self, run: Run) -> None:
        self.module = mlp()
        self.model, self.opt = run.model(self.module), sgd(self.module)
        self.steps, self.rows, self.average = 0, 0, 0.0

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps += 1
        self.rows += len(x)
        self.average += (1 / self.steps - self.average) / (self.steps + 1)
        for group in self.opt.param_groups:
            group["lr"] = 0.1 * min(1.0, self.steps / 3)
        loss = loss_of(self.model, x, y)
        backward_and_step(loss * (1 + self.average), self.opt)
        return loss * 2 if self.steps % 4 == 0 else loss


@case()
def a_trainer_counts(run: Run) -> Job:
    """Captured again where its warm-up ends, and in the fourth step."""
    trainer = Trainer(run)

    def counts() -> object:
        return repr((trainer.steps, trainer.rows, trainer.average, trainer.opt.param_groups[0]["lr"]))

    objects: dict[str, Any] = {"model": trainer.module, "opt": trainer.opt, "counts": counts}
    return Job(step=run.compile(trainer.step), batches=class_batches(run, 9), objects=objects)


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * math.exp(-self.calls / 50)  # type: ignore[no-any-return]


@case()
def a_module_counts_its_calls(run: Run) -> Job:
    module = Annealed()
    return recording(usual_job(run, module, calls=4), calls=lambda: module.calls)


class Alternating:
    """Counts its calls, and in each second one does what `deed` does to it."""

    def __init__(self, run: Run, deed: Callable[[Alternating, Tensor], object]) -> None:
        self.module, self.deed = mlp(), deed
        self.model, self.opt = run.model(self.module), sgd(self.module)
        self.scheduler = lr_scheduler.ExponentialLR(self.opt, 0.5)
        self.dropout = nn.Dropout(0.0)
        self.calls, self.scale, self.note, self.last = 0, {"v": 1.0}, "a", None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.model, self.dropout(x), y) * self.scale["v"]
        backward_and_step(loss, self.opt)
        self.calls += 1
        if self.calls % 2 == 0:
            self.deed(self, loss)
        return loss

    def seen(self) -> object:
        schedule = {key: value for key, value in self.scheduler.state_dict().items() if key != "_is_initial"}
        mode = self.dropout.training
        return repr((self.calls, self.scale, self.note, mode, schedule, self.opt.param_groups[0]["lr"]))


def _scale(owner: Alternating, loss: Tensor) -> None:
    owner.scale["v"] *= 0.5


def _schedule(owner: Alternating, loss: Tensor) -> None:
    owner.scheduler.step()


def _rate(owner: Alternating, loss: Tensor) -> None:
    owner.opt.param_groups[0]["lr"] *= 0.5


def _mode(owner: Alternating, loss: Tensor) -> None:
    owner.dropout.eval()


def _text(owner: Alternating, loss: Tensor) -> None:
    owner.note = "b"


def _tensor(owner: Alternating, loss: Tensor) -> None:
    owner.last = loss.detach()  # type: ignore[assignment]


DEEDS = {"scale": _scale, "schedule": _schedule, "rate": _rate, "mode": _mode, "text": _text, "tensor": _tensor}


def every_second_call(name: str) -> Callable[[Run], Job]:
    def build(run: Run) -> Job:
        owner = Alternating(run, DEEDS[name])
        objects: dict[str, Any] = {"model": owner.module, "opt": owner.opt, "seen": owner.seen}
        objects["last"] = lambda: owner.last
        return Job(step=run.compile(owner.step), batches=class_batches(run, 6), objects=objects)

    build.__name__ = f"{name}_in_every_second_call"
    return build


for _name in DEEDS:
    case()(every_second_call(_name))


class Starter:
    """Notes that it has begun; its first call returns something else."""

    def __init__(self, run: Run) -> None:
        self.module = mlp()
        self.model, self.opt = run.model(self.module), sgd(self.module)
        self.began = ""

    def step(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        loss = loss_of(self.model, x, y)
        backward_and_step(loss, self.opt)
        before, self.began = self.began, "yes"
        return {"loss": loss, "began": before}


@case()
def the_first_call_differs_in_plain_python_only(run: Run) -> Job:
    starter = Starter(run)
    objects: dict[str, Any] = {"model": starter.module, "opt": starter.opt, "began": lambda: starter.began}
    return Job(step=run.compile(starter.step), batches=class_batches(run, 4), objects=objects)


@case(live=False)
def frozen_and_set_free_again(run: Run) -> Job:
    """A step that has its tensors as they were at its end: another part of the model is frozen for a while."""
    module, critic = mlp(), mlp()
    opt = sgd(module)
    model = run.model(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        handle = critic[0].bias.register_hook(lambda grad: grad * torch.inf)
        critic.requires_grad_(False)
        loss = loss_of(model, x, y) + loss_of(critic, x, y)
        handle.remove()
        critic.requires_grad_(True)
        return backward_and_step(loss, opt)

    return Job(step=run.compile(step), batches=class_batches(run, 3), objects={"model": module, "critic": critic})
