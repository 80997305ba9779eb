"""Autograd beyond one backward: gradients of inputs, checkpoints, kept graphs, own functions, several losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.idioms.base import CLASSES, FEATURES, HIDDEN, Loop, idiom, loop, mlp, sgd, small_training, update


@idiom()
def fast_gradient_sign() -> Loop:
    """FGSM: the batch itself requires grad, and `x.grad` moves it."""
    model, opt = small_training()

    def step(x, y):
        x.requires_grad_()
        F.cross_entropy(model(x), y).backward()
        attacked = (x + 0.1 * x.grad.sign()).detach()
        opt.zero_grad()
        return update(F.cross_entropy(model(attacked), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def projected_gradient_descent() -> Loop:
    """PGD: three steps of an attack by `autograd.grad`, clamped to a ball."""
    model, opt = small_training()

    def step(x, y):
        attacked = x + 0.01 * torch.randn_like(x)
        for _ in range(3):
            attacked = attacked.detach().requires_grad_(True)
            (grad,) = torch.autograd.grad(F.cross_entropy(model(attacked), y), attacked)
            attacked = torch.min(torch.max(attacked + 0.05 * grad.sign(), x - 0.1), x + 0.1)
        return update(F.cross_entropy(model(attacked.detach()), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def checkpoint_reentrant() -> Loop:
    """Reentrant checkpointing of a block whose input has no gradient: its parameters get none."""
    body, head = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh()), nn.Linear(HIDDEN, CLASSES)
    model = nn.ModuleList([body, head])
    opt = sgd(model)

    def step(x, y):
        hidden = checkpoint(body, x, use_reentrant=True)
        return update(F.cross_entropy(head(hidden), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def checkpoint_with_dropout() -> Loop:
    """Checkpointing without reentry, with a dropout that is drawn again."""
    body = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Dropout(0.3))
    head = nn.Linear(HIDDEN, CLASSES)
    model = nn.ModuleList([body, head])
    opt = sgd(model)

    def step(x, y):
        hidden = checkpoint(body, x, use_reentrant=False)
        return update(F.cross_entropy(head(hidden), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def loss_kept_with_its_graph() -> Loop:
    """The loss of this call is added to that of the last, whose graph was kept: one backward in two calls."""
    model, opt = small_training()
    held = []

    def step(x, y):
        held.append(F.cross_entropy(model(x), y))
        if len(held) == 2:
            update(sum(held), opt)
            held.clear()

    return loop(step, model=model, opt=opt, count=lambda: len(held))


@idiom(ranks=True, added_on_ranks=True, inductor=True)
def two_losses_one_graph() -> Loop:
    """`retain_graph=True` for the first of two backwards."""
    model, opt = small_training()

    def step(x, y):
        logits = model(x)
        first, second = F.cross_entropy(logits, y), logits.pow(2).mean()
        first.backward(retain_graph=True)
        second.backward()
        opt.step()
        opt.zero_grad()
        return first.detach(), second.detach()

    return loop(step, model=model, opt=opt)


@idiom()
def gradient_penalty() -> Loop:
    """The norm of the input's gradient in the loss: a backward through a backward."""
    model, opt = small_training()

    def step(x, y):
        x = x.detach().requires_grad_(True)
        logits = model(x)
        (grad,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return update(F.cross_entropy(logits, y) + (grad.norm(dim=1) - 1.0).pow(2).mean(), opt)

    return loop(step, model=model, opt=opt)


class RoundStraightThrough(torch.autograd.Function):
    """Rounds forward, and lets the gradient pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1.5)


@idiom()
def function_of_the_user() -> Loop:
    """A quantizer with a backward of its own."""
    model, opt = small_training()

    def step(x, y):
        hidden = RoundStraightThrough.apply(model[0](x) * 4) / 4
        return update(F.cross_entropy(model[2](hidden), y), opt)

    return loop(step, model=model, opt=opt)


@idiom()
def hook_on_a_tensor_reads() -> Loop:
    """A hook on an activation notes the size of its gradient."""
    model, opt = small_training()
    sizes = []

    def step(x, y):
        hidden = model[0](x)
        hidden.register_hook(lambda grad: sizes.append(float(grad.abs().max())))
        return update(F.cross_entropy(model[2](hidden.tanh()), y), opt)

    return loop(step, model=model, opt=opt, sizes=sizes)


@idiom()
def gradient_of_an_activation() -> Loop:
    """Grad-CAM: `retain_grad`, then the gradient is read after the backward."""
    model, opt = small_training()
    weights = []

    def step(x, y):
        hidden = model[0](x)
        hidden.retain_grad()
        F.cross_entropy(model[2](hidden.tanh()), y).backward()
        weights.append((hidden.grad * hidden.detach()).mean(0))
        opt.step()
        opt.zero_grad()

    return loop(step, model=model, opt=opt, weights=weights)


@idiom()
def inner_steps_of_maml() -> Loop:
    """One step of adaptation inside, through which the outer gradient goes."""
    model, opt = small_training()

    def step(x, y):
        params = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, params, (x[:3],)), y[:3])
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        adapted = {name: p - 0.1 * g for (name, p), g in zip(params.items(), grads, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(model, adapted, (x[3:],)), y[3:])
        return update(outer, opt)

    return loop(step, model=model, opt=opt)


@idiom()
def functional_gradients() -> Loop:
    """`torch.func`: a gradient per row by vmap, their mean written into `p.grad`."""
    model, opt = small_training()

    def row_loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    def step(x, y):
        params = {name: p.detach() for name, p in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(row_loss), in_dims=(None, 0, 0))(params, x, y)
        for name, param in model.named_parameters():
            clipped = grads[name].flatten(1)
            clipped = clipped / clipped.norm(dim=1, keepdim=True).clamp(min=1.0)
            param.grad = clipped.mean(0).view_as(param)
        opt.step()
        opt.zero_grad()

    return loop(step, model=model, opt=opt)


@idiom()
def conflicting_gradients() -> Loop:
    """PCGrad: gradients of two tasks, projected where they disagree, which Python asks."""
    model, opt = small_training()
    conflicts = []

    def step(x, y):
        logits, params = model(x), list(model.parameters())
        losses = F.cross_entropy(logits, y), F.cross_entropy(logits, y.flip(0))
        first, second = (torch.autograd.grad(one, params, retain_graph=True) for one in losses)
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        if dot < 0:
            size = sum(b.pow(2).sum() for b in second)
            first = [a - dot / size * b for a, b in zip(first, second, strict=True)]
        conflicts.append(bool(dot < 0))
        for param, a, b in zip(params, first, second, strict=True):
            param.grad = a + b
        opt.step()
        return losses[0].detach()

    return loop(step, model=model, opt=opt, conflicts=conflicts)


@idiom(ranks=True)
def hidden_state_carried() -> Loop:
    """Truncated backpropagation: the hidden state goes on to the next call, detached."""
    rnn, head = nn.GRU(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    model, state = nn.ModuleList([rnn, head]), {"hidden": torch.zeros(1, HIDDEN)}
    opt = sgd(model)

    def step(x, y):
        outputs, hidden = rnn(x, state["hidden"])
        state["hidden"] = hidden.detach()
        return update(F.cross_entropy(head(outputs), y), opt)

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def metrics_without_gradients() -> Loop:
    """`no_grad`, `inference_mode` and `set_grad_enabled` in one step."""
    model, opt = small_training()
    seen = []

    def step(x, y):
        loss = update(F.cross_entropy(model(x), y), opt)
        with torch.no_grad():
            after = F.cross_entropy(model(x), y)
        with torch.inference_mode():
            best = model(x).max().item()
        with torch.set_grad_enabled(len(seen) % 2 == 0):
            again = model(x)
        seen.append((after.item() < loss.item(), best, again.requires_grad))

    return loop(step, model=model, opt=opt, seen=seen)


@idiom()
def curvature_probe() -> Loop:
    """Hutchinson: a product with the Hessian, by two calls of `autograd.grad`, scales the update."""
    model, rate = mlp(), 0.1

    def step(x, y):
        loss, params = F.cross_entropy(model(x), y), list(model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=True)
        signs = [torch.randint_like(p, 2) * 2 - 1 for p in params]
        products = torch.autograd.grad(grads, params, grad_outputs=signs)
        with torch.no_grad():
            for param, grad, sign, product in zip(params, grads, signs, products, strict=True):
                param -= rate * grad / ((sign * product).abs() + 1.0)
        return loss.detach()

    return loop(step, model=model)


@idiom()
def gradient_reversed() -> Loop:
    """Domain adaptation: a strength that grows is baked into a Function by a closure."""
    body, classes, domains = mlp(), nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, 2)
    model, state = nn.ModuleList([body, classes, domains]), {"strength": 0.0}
    opt = sgd(model)

    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, strength):
            ctx.strength = strength
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -ctx.strength * grad, None

    def step(x, y):
        state["strength"] += 0.1
        hidden = body(x)
        domain_loss = F.cross_entropy(domains(Reverse.apply(hidden, state["strength"])), y % 2)
        return update(F.cross_entropy(classes(hidden), y) + domain_loss, opt)

    return loop(step, model=model, opt=opt, state=state)


@idiom()
def style_transfer() -> Loop:
    """An image is what is optimized: a leaf tensor that no module owns, clamped under `no_grad`."""
    features, image = mlp().requires_grad_(False), torch.rand(1, FEATURES).requires_grad_()
    opt = torch.optim.Adam([image], lr=0.05)

    def step(x, y):
        loss = update(F.mse_loss(features(image), features(x[:1])), opt)
        with torch.no_grad():
            image.clamp_(0, 1)
        return loss

    return loop(step, image=lambda: image, opt=opt)


@idiom()
def gradients_kept_behind_zero_grad() -> Loop:
    """Gradients of this call are compared with those of the last: they outlive `zero_grad`."""
    model, opt = small_training()
    last, cosines = {"grad": None}, []

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        grad = model[2].weight.grad
        opt.step()
        opt.zero_grad()
        if last["grad"] is not None:
            cosines.append(F.cosine_similarity(grad.flatten(), last["grad"].flatten(), dim=0).item())
        last["grad"] = grad
        return loss.detach()

    return loop(step, model=model, opt=opt, last=last, cosines=cosines)


@idiom()
def saved_tensors_packed() -> Loop:
    """Hooks on what autograd saves: counted, rounded to bfloat16, and brought back."""
    model, opt = small_training()
    counts = {"packed": 0, "unpacked": 0}

    def pack(tensor):
        counts["packed"] += 1
        return tensor.bfloat16() if tensor.is_floating_point() else tensor

    def unpack(tensor):
        counts["unpacked"] += 1
        return tensor.float() if tensor.is_floating_point() else tensor

    def step(x, y):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = F.cross_entropy(model(x), y)
        return update(loss, opt)

    return loop(step, model=model, opt=opt, counts=counts)


@idiom()
def anomaly_detection() -> Loop:
    """The debugging mode of autograd in every third call."""
    model, opt = small_training()
    calls = {"n": 0}

    def step(x, y):
        calls["n"] += 1
        with torch.autograd.set_detect_anomaly(calls["n"] % 3 == 0):
            return update(F.cross_entropy(model(x), y), opt)

    return loop(step, model=model, opt=opt, calls=calls)
