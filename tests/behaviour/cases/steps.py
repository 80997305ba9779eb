"""Cases about the form of the step: how gradients are made, kept and used."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    add_step,
    class_batches,
    loss_of,
    mlp,
    sgd,
    step_job,
    unwrap,
    usual_job,
)
from tests.harness.training import backward_and_step

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)


case(name="backward_and_step")(lambda run: usual_job(run, mlp()))


@step_case(traces=(1, 2))
def values_are_checked(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Branches on data that only raise; the step goes on in one graph."""
    if y is not None and y.max() >= CLASSES:
        raise ValueError(f"labels must be below {CLASSES}")
    opt.zero_grad()
    loss = loss_of(model, x, y)
    assert torch.isfinite(loss), "the loss has diverged"
    loss.backward()
    opt.step()
    return loss.detach()


@step_case(traces=(1, 2))
def zero_grad_at_start(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The gradients of the last step stay readable after the call."""
    opt.zero_grad()
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


def _gradients_kept(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss.detach()


@case(traces=(2,))
def gradients_detached_in_place(run: Run) -> Job:
    """Between the calls, as old loops do to clear them: they may be views of nothing."""
    module = mlp()

    def between(call: int) -> None:
        for param in module.parameters():
            assert param.grad is not None
            param.grad.detach_().zero_()

    return step_job(run, _gradients_kept, module, batches=class_batches(run, 4), between=between)


@case(traces=(2,), ranks=False)
def gradients_that_were_views_move(run: Run) -> Job:
    """All gradients lie in one tensor, until ``.double()`` gives each memory of its own. The hooks of an eager
    DistributedDataParallel are gone then, and ranks drift apart."""
    module = mlp()

    def between(call: int) -> None:
        if call == 1:
            module.double()
            return
        dtype = next(module.parameters()).dtype
        flat = torch.zeros(sum(p.numel() for p in module.parameters()), dtype=dtype)
        for param, grad in zip(module.parameters(), flat.split([p.numel() for p in module.parameters()]), strict=True):
            param.grad = grad.view_as(param)

    between(0)
    batches = [(x if call < 2 else x.double(), y) for call, (x, y) in enumerate(class_batches(run, 4))]
    return step_job(run, _gradients_kept, module, batches=batches, between=between)


@step_case(traces=(2,))
def zero_grad_to_zeros_at_end(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """``set_to_none=False``: no gradient at the first call, zeros at the later ones."""
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    return loss


@step_case(traces=(2,))
def zero_grad_to_zeros_at_start(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    opt.zero_grad(set_to_none=False)
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


@step_case(optimizer=lambda module: sgd(module, lr=0.02), traces=(2,))
def gradients_never_zeroed(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Gradients accumulate over the calls, after every optimizer step."""
    loss = loss_of(model, x, y)
    loss.backward()
    opt.step()
    return loss


@case(traces=(2,))
def no_optimizer_leaves_grad(run: Run) -> Job:
    module = mlp()
    model = run.model(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module})


@case()
def optimizer_outside(run: Run) -> Job:
    """The compiled step leaves gradients; an eager optimizer uses and clears them between the calls."""
    module = mlp()
    model, opt = run.model(module), torch.optim.AdamW(module.parameters(), lr=1e-2)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    def update(call: int) -> None:
        opt.step()
        opt.zero_grad()

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt}, between=update)


@case()
def autograd_grad_by_hand(run: Run) -> Job:
    module = mlp()
    params = list(module.parameters())

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        grads = run.grads(torch.autograd.grad(loss, params))
        with torch.no_grad():
            for param, grad in zip(params, grads, strict=True):
                param.sub_(grad, alpha=0.1)
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module})


@case()
def autograd_grad_into_optimizer(run: Run) -> Job:
    module = mlp()
    opt = sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        grads = run.grads(torch.autograd.grad(loss, list(module.parameters())))
        for param, grad in zip(module.parameters(), grads, strict=True):
            param.grad = grad
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case()
def accumulation(run: Run) -> Job:
    """Two backward calls, one update: reduced once."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        first, second = zip(x.chunk(2), y.chunk(2), strict=True)
        with run.no_sync(model):
            half = loss_of(model, *first) / 2
            half.backward()
        other = loss_of(model, *second) / 2
        backward_and_step(other, opt)
        return half + other

    return Job(step=step, batches=class_batches(run, rows=6), objects={"model": module, "opt": opt})


@case()
def accumulation_in_a_loop(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), torch.optim.AdamW(module.parameters(), lr=1e-2)

    @run.compile
    def step(x: Tensor, y: Tensor) -> list[Tensor]:
        opt.zero_grad()
        parts = list(zip(x.split(2), y.split(2), strict=True))
        losses = []
        with run.no_sync(model):
            for part in parts[:-1]:
                losses.append(loss_of(model, *part))
                (losses[-1] / len(parts)).backward()
        losses.append(loss_of(model, *parts[-1]))
        backward_and_step(losses[-1] / len(parts), opt)
        return losses

    return Job(step=step, batches=class_batches(run, rows=6), objects={"model": module, "opt": opt})


@step_case()
def two_updates_in_one_step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both gradients of each parameter are used, so both must be reduced."""
    losses = []
    for _ in range(2):
        losses.append(loss_of(model, x, y))
        backward_and_step(losses[-1], opt)
    return losses[0], losses[1]


@step_case(ranks=False)  # DistributedDataParallel reduces once per forward, so it has no meaning for this step
def two_backwards_through_one_graph(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward(retain_graph=True)
    backward_and_step(loss * loss, opt)
    return loss


@step_case(batches=lambda run: run.batches(3, (ROWS, FEATURES), (ROWS, CLASSES)))
def backward_with_gradient(model: Any, opt: Optimizer, x: Tensor, weights: Tensor) -> Tensor:
    out = model(x)
    out.backward(gradient=weights)
    opt.step()
    opt.zero_grad()
    return out


@step_case()
def gradient_edited_by_hand(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)
        param.grad.add_(torch.randn_like(param), alpha=1e-2)
    unwrap(model)[0].weight.grad = unwrap(model)[0].weight.grad.clamp(-0.1, 0.1)
    opt.step()
    opt.zero_grad()
    return loss


@step_case(
    module=lambda: nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)),
    optimizer=lambda module: sgd(module, lr=0.02),
    batches=lambda run: run.batches(3, (ROWS, FEATURES)),
)
def gradient_penalty(model: Any, opt: Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """A second derivative: the gradient with respect to the input is part of the loss."""
    points = x.detach().requires_grad_(True)
    # The bias of the last layer has no part in the penalty, but it has one in the score: every parameter is used.
    score = model(points).sum()
    (slope,) = torch.autograd.grad(score, points, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return backward_and_step(score / len(x) + 10 * penalty, opt), penalty


@step_case()
def adversarial_input(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient with respect to an input made inside the step, used for a second forward."""
    points = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(loss_of(unwrap(model), points, y), points)
    loss = loss_of(model, (points + 0.1 * slope.sign()).detach(), y)
    backward_and_step(loss, opt)
    return loss, slope


@case()
def gan(run: Run) -> Job:
    """Two modules, two optimizers, and a discriminator whose gradients are made twice."""
    makes = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, FEATURES))
    judges = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LeakyReLU(), nn.Linear(HIDDEN, 1))
    generator, discriminator = run.model(makes), run.model(judges)
    makes_opt = torch.optim.Adam(makes.parameters(), lr=1e-2, betas=(0.5, 0.999))
    judges_opt = sgd(judges)

    @run.compile
    def step(real: Tensor, noise: Tensor) -> dict[str, Tensor]:
        fake = generator(noise)
        judges_opt.zero_grad()
        judged = discriminator(torch.cat([real, fake.detach()]))
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]).to(judged.device)
        judges_loss = F.binary_cross_entropy_with_logits(judged, truth)
        backward_and_step(judges_loss, judges_opt)
        makes_loss = -discriminator(fake).mean()
        backward_and_step(makes_loss, makes_opt)
        judges_opt.zero_grad()
        return {"judges": judges_loss, "makes": makes_loss}

    objects = {"makes": makes, "judges": judges, "makes_opt": makes_opt, "judges_opt": judges_opt}
    return Job(step=step, batches=run.batches(3, (ROWS, FEATURES), (ROWS, 4)), objects=objects)


@case()
def parameter_groups(run: Run) -> Job:
    module = mlp()
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": weights, "lr": 0.1, "weight_decay": 0.1}, {"params": biases, "lr": 0.3, "momentum": 0.0}]
    return usual_job(run, module, optimizer=lambda _: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
