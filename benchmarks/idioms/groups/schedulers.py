"""What follows the training by a schedule: rates, decays, weights of losses, averages of parameters."""

from __future__ import annotations

import copy
import math
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel

from benchmarks.idioms.base import Loop, idiom, loop, mlp, small_training, update


def stepped_inside(make) -> Loop:
    """A step that ends with `scheduler.step()` and returns the rate."""
    model, opt = small_training()
    scheduler = make(opt)

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        scheduler.step()
        return loss, scheduler.get_last_lr()[0]

    return loop(step, model=model, opt=opt, scheduler=scheduler)


@idiom(ranks=True, inductor=True)
def step_lr() -> Loop:
    """StepLR: a factor every third call."""
    return stepped_inside(lambda opt: lr_scheduler.StepLR(opt, step_size=3, gamma=0.5))


@idiom(ranks=True)
def multi_step_lr() -> Loop:
    """MultiStepLR: a factor at calls 2 and 5, which stand in a Counter."""
    return stepped_inside(lambda opt: lr_scheduler.MultiStepLR(opt, milestones=[2, 5], gamma=0.1))


@idiom()
def exponential_lr() -> Loop:
    """ExponentialLR."""
    return stepped_inside(lambda opt: lr_scheduler.ExponentialLR(opt, gamma=0.9))


@idiom()
def cosine_annealing_lr() -> Loop:
    """CosineAnnealingLR."""
    return stepped_inside(lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=6, eta_min=0.01))


@idiom()
def cosine_with_restarts() -> Loop:
    """CosineAnnealingWarmRestarts: the number of the epoch turns round."""
    return stepped_inside(lambda opt: lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=3, T_mult=2))


@idiom()
def one_cycle_lr() -> Loop:
    """OneCycleLR: it moves the momentum as well."""
    return stepped_inside(lambda opt: lr_scheduler.OneCycleLR(opt, max_lr=0.3, total_steps=12))


@idiom()
def cyclic_lr() -> Loop:
    """CyclicLR, up and down."""
    return stepped_inside(lambda opt: lr_scheduler.CyclicLR(opt, base_lr=0.01, max_lr=0.2, step_size_up=2))


@idiom()
def linear_warmup() -> Loop:
    """LinearLR over the first four calls."""
    return stepped_inside(lambda opt: lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=4))


@idiom()
def polynomial_lr() -> Loop:
    """PolynomialLR, as segmentation has it."""
    return stepped_inside(lambda opt: lr_scheduler.PolynomialLR(opt, total_iters=8, power=0.9))


@idiom(ranks=True)
def warmup_then_linear_decay() -> Loop:
    """LambdaLR as `get_linear_schedule_with_warmup` makes it."""
    warmup, total = 3, 10

    def factor(current):
        if current < warmup:
            return current / max(1, warmup)
        return max(0.0, (total - current) / max(1, total - warmup))

    return stepped_inside(lambda opt: lr_scheduler.LambdaLR(opt, factor))


@idiom()
def warmup_then_cosine() -> Loop:
    """LambdaLR as `get_cosine_schedule_with_warmup` makes it."""
    warmup, total, cycles = 3, 10, 0.5

    def factor(current):
        if current < warmup:
            return current / max(1, warmup)
        progress = (current - warmup) / max(1, total - warmup)
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)))

    return stepped_inside(lambda opt: lr_scheduler.LambdaLR(opt, factor))


@idiom()
def sequence_of_schedules() -> Loop:
    """SequentialLR: a warmup, then an exponential decay."""

    def make(opt):
        warmup = lr_scheduler.LinearLR(opt, start_factor=0.1, total_iters=3)
        return lr_scheduler.SequentialLR(opt, [warmup, lr_scheduler.ExponentialLR(opt, gamma=0.9)], milestones=[3])

    return stepped_inside(make)


@idiom()
def chained_schedules() -> Loop:
    """ChainedScheduler: two at once."""

    def make(opt):
        held = lr_scheduler.ConstantLR(opt, factor=0.1, total_iters=4)
        return lr_scheduler.ChainedScheduler([held, lr_scheduler.ExponentialLR(opt, gamma=0.9)], optimizer=opt)

    return stepped_inside(make)


@idiom()
def reduce_on_plateau() -> Loop:
    """ReduceLROnPlateau is given the loss in every call."""
    model, opt = small_training()
    scheduler = lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        scheduler.step(loss)
        return loss, opt.param_groups[0]["lr"]

    return loop(step, model=model, opt=opt, scheduler=scheduler)


@idiom()
def scheduler_in_a_branch() -> Loop:
    """An epoch is three calls long, and the schedule goes on at its end."""
    model, opt = small_training()
    scheduler, calls = lr_scheduler.StepLR(opt, step_size=1, gamma=0.7), {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        calls["n"] += 1
        if calls["n"] % 3 == 0:
            scheduler.step()
            print("epoch", calls["n"] // 3, "rate", opt.param_groups[0]["lr"])
        return loss

    return loop(step, model=model, opt=opt, scheduler=scheduler, calls=calls)


@idiom(ranks=True)
def rate_written_into_the_groups() -> Loop:
    """nanoGPT's way: a rate is computed and written into every group before the update."""
    model = mlp()
    opt = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1)
    state = {"iteration": 0}

    def rate(iteration):
        if iteration < 3:
            return 0.05 * (iteration + 1) / 4
        return 0.01 + 0.5 * (1.0 + math.cos(math.pi * (iteration - 3) / 7)) * 0.04

    def step(x, y):
        for number, group in enumerate(opt.param_groups):
            group["lr"] = rate(state["iteration"]) * (0.9**number)
        state["iteration"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def weight_decay_schedule() -> Loop:
    """DINO's way: the decay of a group rises, from a table that was made before."""
    model = mlp()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    table, calls = torch.linspace(0.04, 0.4, 10).tolist(), {"n": 0}

    def step(x, y):
        opt.param_groups[0]["weight_decay"] = table[calls["n"]]
        calls["n"] += 1
        return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)


class Accelerator:
    """As much of accelerate as its examples use: gradients are accumulated over two calls."""

    def __init__(self, model, opt, scheduler, every=2):
        self.model, self.opt, self.scheduler, self.every = model, opt, scheduler, every
        self.calls, self.sync_gradients = 0, False

    @contextmanager
    def accumulate(self):
        self.calls += 1
        self.sync_gradients = self.calls % self.every == 0
        yield

    def backward(self, loss):
        (loss / self.every).backward()

    def step(self):
        if self.sync_gradients:
            self.opt.step()
            self.scheduler.step()
            self.opt.zero_grad()


@idiom()
def accumulate_with_a_scheduler() -> Loop:
    """accelerate's `accumulate`: optimizer and scheduler step in every second call."""
    model, opt = small_training()
    scheduler = lr_scheduler.LambdaLR(opt, lambda current: 1.0 / (1 + current))
    accelerator = Accelerator(model, opt, scheduler)

    def step(x, y):
        with accelerator.accumulate():
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.step()
        return loss.detach()

    counted = lambda: (accelerator.calls, accelerator.sync_gradients)  # noqa: E731
    return loop(step, model=model, opt=opt, scheduler=scheduler, counted=counted)


@idiom()
def stochastic_weight_averaging() -> Loop:
    """From call 5 on the rate is SWA's, and an averaged model follows every second call."""
    model, opt = small_training()
    averaged, schedule = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    calls = {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        calls["n"] += 1
        if calls["n"] >= 5:
            schedule.step()
            if calls["n"] % 2 == 0:
                averaged.update_parameters(model)
        return loss

    return loop(step, model=model, opt=opt, averaged=averaged, schedule=schedule, calls=calls)


@idiom()
def loss_weight_annealed() -> Loop:
    """The weight of the second loss grows with the number of the call, as in a VAE."""
    model, opt = small_training()
    state = {"call": 0}

    def step(x, y):
        weight = min(1.0, state["call"] / 6)
        state["call"] += 1
        logits = model(x)
        return update(F.cross_entropy(logits, y) + weight * logits.pow(2).mean(), opt), weight

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def ema_with_a_moving_decay() -> Loop:
    """The decay follows the number of updates, as `min(decay, (1 + n) / (10 + n))`."""
    model, opt = small_training()
    ema, state = copy.deepcopy(model), {"updates": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        state["updates"] += 1
        decay = min(0.999, (1 + state["updates"]) / (10 + state["updates"]))
        with torch.no_grad():
            for kept, param in zip(ema.parameters(), model.parameters(), strict=True):
                kept.mul_(decay).add_(param, alpha=1 - decay)
        return loss, decay

    return loop(step, model=model, opt=opt, ema=ema, state=state)


class ExponentialMovingAverage:
    """What torch_ema keeps: shadows of parameters, and how to swap them in."""

    def __init__(self, parameters, decay):
        self.decay, self.updates = decay, 0
        self.parameters = list(parameters)
        self.shadow = [p.clone().detach() for p in self.parameters]
        self.stored = []

    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        with torch.no_grad():
            for shadow, param in zip(self.shadow, self.parameters, strict=True):
                difference = shadow - param
                difference.mul_(1.0 - decay)
                shadow.sub_(difference)

    def store(self):
        self.stored = [p.clone() for p in self.parameters]

    def copy_to(self):
        for shadow, param in zip(self.shadow, self.parameters, strict=True):
            param.data.copy_(shadow.data)

    def restore(self):
        for stored, param in zip(self.stored, self.parameters, strict=True):
            param.data.copy_(stored.data)


@idiom()
def ema_object_swapped_in() -> Loop:
    """torch_ema: updated in every call; every third call is also evaluated with the averages."""
    model, opt = small_training()
    ema, losses = ExponentialMovingAverage(model.parameters(), 0.99), []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        ema.update()
        if ema.updates % 3 == 0:
            ema.store()
            ema.copy_to()
            with torch.no_grad():
                losses.append(F.cross_entropy(model(x), y).item())
            ema.restore()
        return loss

    return loop(step, model=model, opt=opt, shadow=lambda: ema.shadow, updates=lambda: ema.updates, losses=losses)


@idiom()
def data_of_parameters_replaced() -> Loop:
    """Lookahead: every second call `p.data = ...` puts an average of slow and fast weights in."""
    model, opt = small_training()
    slow, calls = [p.detach().clone() for p in model.parameters()], {"n": 0}

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        calls["n"] += 1
        if calls["n"] % 2 == 0:
            for number, param in enumerate(model.parameters()):
                slow[number] = 0.5 * slow[number] + 0.5 * param.data
                param.data = slow[number].clone()
        return loss

    return loop(step, model=model, opt=opt, slow=slow, calls=calls)
