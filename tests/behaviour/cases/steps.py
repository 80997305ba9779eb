"""Cases about the form of the step: how gradients are made, kept and used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    ROWS,
    class_batches,
    loss_of,
    mlp,
    sgd,
    usual_job,
)

registry = Registry()
case = registry.add


@case()
def backward_and_step(run: Run) -> Job:
    return usual_job(run, mlp())


@case(traces=(1, 2))
def values_are_checked(run: Run) -> Job:
    """Branches on data that only raise; the step goes on in one graph."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        if y is not None and y.max() >= CLASSES:
            raise ValueError(f"labels must be below {CLASSES}")
        opt.zero_grad()
        loss = loss_of(model, x, y)
        assert torch.isfinite(loss), "the loss has diverged"
        loss.backward()
        opt.step()
        return loss.detach()

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(1, 2))
def zero_grad_at_start(run: Run) -> Job:
    """The gradients of the last step stay readable after the call."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(2,))
def zero_grad_to_zeros_at_end(run: Run) -> Job:
    """``set_to_none=False``: no gradient at the first call, zeros at the later ones."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(2,))
def zero_grad_to_zeros_at_start(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(traces=(2,))
def gradients_never_zeroed(run: Run) -> Job:
    """Gradients accumulate over the calls, after every optimizer step."""
    module = mlp()
    model, opt = run.model(module), sgd(module, lr=0.02)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


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
        other.backward()
        opt.step()
        opt.zero_grad()
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
        (losses[-1] / len(parts)).backward()
        opt.step()
        opt.zero_grad()
        return losses

    return Job(step=step, batches=class_batches(run, rows=6), objects={"model": module, "opt": opt})


@case()
def two_updates_in_one_step(run: Run) -> Job:
    """Both gradients of each parameter are used, so both must be reduced."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        for _ in range(2):
            losses.append(loss_of(model, x, y))
            losses[-1].backward()
            opt.step()
            opt.zero_grad()
        return losses[0], losses[1]

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case(ranks=False)  # DistributedDataParallel reduces once per forward, so it has no meaning for this step
def two_backwards_through_one_graph(run: Run) -> Job:
    module = mlp()
    opt = sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(module, x, y)
        loss.backward(retain_graph=True)
        (loss * loss).backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case()
def backward_with_gradient(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, weights: Tensor) -> Tensor:
        out = model(x)
        out.backward(gradient=weights)
        opt.step()
        opt.zero_grad()
        return out

    batches = run.batches(3, (ROWS, FEATURES), (ROWS, CLASSES))
    return Job(step=step, batches=batches, objects={"model": module, "opt": opt})


@case()
def gradient_edited_by_hand(run: Run) -> Job:
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        for param in module.parameters():
            assert param.grad is not None
            param.grad.mul_(0.5)
            param.grad.add_(torch.randn_like(param), alpha=1e-2)
        module[0].weight.grad = module[0].weight.grad.clamp(-0.1, 0.1)
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


@case()
def gradient_penalty(run: Run) -> Job:
    """A second derivative: the gradient with respect to the input is part of the loss."""
    module = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    # The bias of the last layer has no part in the penalty, but it has one in the score: every parameter is used.
    model, opt = run.model(module), sgd(module, lr=0.02)

    @run.compile
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        points = x.detach().requires_grad_(True)
        score = model(points).sum()
        (slope,) = torch.autograd.grad(score, points, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = score / len(x) + 10 * penalty
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, penalty

    return Job(step=step, batches=run.batches(3, (ROWS, FEATURES)), objects={"model": module, "opt": opt})


@case()
def adversarial_input(run: Run) -> Job:
    """The gradient with respect to an input made inside the step, used for a second forward."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        points = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(loss_of(module, points, y), points)
        loss = loss_of(model, (points + 0.1 * slope.sign()).detach(), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss, slope

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})


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
        judges_loss.backward()
        judges_opt.step()
        judges_opt.zero_grad()
        makes_loss = -discriminator(fake).mean()
        makes_loss.backward()
        makes_opt.step()
        makes_opt.zero_grad()
        judges_opt.zero_grad()
        return {"judges": judges_loss, "makes": makes_loss}

    objects = {"makes": makes, "judges": judges, "makes_opt": makes_opt, "judges_opt": judges_opt}
    return Job(step=step, batches=run.batches(3, (ROWS, FEATURES), (ROWS, 4)), objects=objects)


@case()
def parameter_groups(run: Run) -> Job:
    module = mlp()
    model = run.model(module)
    weights = [p for p in module.parameters() if p.ndim > 1]
    biases = [p for p in module.parameters() if p.ndim == 1]
    groups = [{"params": weights, "lr": 0.1, "weight_decay": 0.1}, {"params": biases, "lr": 0.3, "momentum": 0.0}]
    opt = torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})
