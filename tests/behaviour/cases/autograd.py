"""Cases about code that reaches into autograd or the dispatcher: functions, operators, hooks, checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    CLASSES,
    FEATURES,
    HIDDEN,
    add_step,
    batch_norm_net,
    class_batches,
    loss_of,
    mlp,
    sgd,
    unwrap,
    usual_job,
)

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)


class RoundStraightThrough(torch.autograd.Function):
    """Rounds in the forward, passes the gradient in the backward where the input was small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 1)


class ScaleGradient(torch.autograd.Function):
    """The newer form, with ``setup_context``, an attribute on the context and a constant argument."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.factor * grad, None


class Layer(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


def with_layer(fn: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), Layer(fn), nn.Linear(HIDDEN, CLASSES))


@case()
def autograd_function(run: Run) -> Job:
    return usual_job(run, with_layer(RoundStraightThrough.apply))


@case()
def autograd_function_with_setup_context(run: Run) -> Job:
    return usual_job(run, with_layer(lambda x: ScaleGradient.apply(x, 0.3)))


@torch.library.custom_op("wholestep_behaviour::smooth", mutates_args=())
def smooth(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(factor * x)


@smooth.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def smooth_setup(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.factor = inputs[1]


def smooth_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (out,) = ctx.saved_tensors
    return grad * ctx.factor * (1 - out * out), None


smooth.register_autograd(smooth_backward, setup_context=smooth_setup)


@torch.library.custom_op("wholestep_behaviour::decay_", mutates_args={"x"})
def decay_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


@decay_.register_fake
def _(x: Tensor, factor: float) -> None:
    return None


@case()
def custom_operator(run: Run) -> Job:
    return usual_job(run, with_layer(lambda x: smooth(x, 0.7)))


@step_case()
def custom_operator_that_mutates(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """An operator that writes its argument: gradients before the update, weights after it."""
    loss = loss_of(model, x, y)
    loss.backward()
    for param in model.parameters():
        assert param.grad is not None
        decay_(param.grad, 0.5)
    opt.step()
    opt.zero_grad()
    for param in model.parameters():
        decay_(param.detach(), 0.99)
    return loss


@case()
def tensor_hook_in_forward(run: Run) -> Job:
    limit = torch.tensor(0.02)

    def hooked(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: torch.minimum(grad, limit))
        return x.tanh()

    return usual_job(run, with_layer(hooked))


@case()
def module_hooks(run: Run) -> Job:
    """Forward, pre-forward and full backward hooks that change what passes."""
    module = mlp()
    module[0].register_forward_pre_hook(lambda layer, args: (args[0] * 0.5,))
    module[1].register_forward_hook(lambda layer, args, out: out + 0.1)
    module[2].register_full_backward_hook(lambda layer, grads_in, grads_out: (grads_in[0] * 2,))
    module[2].register_full_backward_pre_hook(lambda layer, grads_out: (grads_out[0] * 0.5,))
    return usual_job(run, module)


@case()
def parameter_hook(run: Run) -> Job:
    """On the parameter itself, and not linear: it must see one rank's gradient before the reduction."""
    module = mlp()
    module[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    module[2].bias.register_hook(lambda grad: 2 * grad)
    return usual_job(run, module)


@case()
def post_accumulate_hook(run: Run) -> Job:
    module = mlp()

    def limit(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    module[0].weight.register_post_accumulate_grad_hook(limit)
    return usual_job(run, module)


@case(ranks=False)  # the update would run before DistributedDataParallel has reduced
def optimizer_in_backward(run: Run) -> Job:
    """One optimizer per parameter, stepped by a hook as soon as the gradient is there."""
    module = mlp()
    model = run.model(module)
    opts = {param: torch.optim.SGD([param], lr=0.1, momentum=0.9) for param in module.parameters()}

    def update(param: Tensor) -> None:
        opts[param].step()
        opts[param].zero_grad()

    for param in opts:
        param.register_post_accumulate_grad_hook(update)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    states = {f"opt{index}": opt for index, opt in enumerate(opts.values())}
    return Job(step=step, batches=class_batches(run), objects={"model": module, **states})


@step_case()
def hook_set_inside_the_step(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    handle = unwrap(model)[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    loss = loss_of(model, x, y)
    loss.backward()
    handle.remove()
    opt.step()
    opt.zero_grad()
    return loss


class Checkpointed(nn.Module):
    """A body whose activations are computed a second time in the backward."""

    def __init__(self, body: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.body, self.use_reentrant = body, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.first(x), use_reentrant=self.use_reentrant)


for _reentrant in (False, True):
    _form = "reentrant" if _reentrant else "non_reentrant"
    case(name=f"checkpoint_{_form}")(lambda run, form=_reentrant: usual_job(run, Checkpointed(mlp(), form)))
    # Both computations must draw the same mask.
    case(name=f"checkpoint_dropout_{_form}")(
        lambda run, form=_reentrant: usual_job(run, Checkpointed(mlp(dropout=0.5), form), calls=4)
    )
    # The statistics move twice, as they do in eager code.
    case(name=f"checkpoint_batch_norm_{_form}")(
        lambda run, form=_reentrant: usual_job(run, Checkpointed(batch_norm_net(), form))
    )


@case()
def checkpoint_under_autocast(run: Run) -> Job:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, x, y)

    return usual_job(run, Checkpointed(mlp(dropout=0.5), use_reentrant=False), loss=loss)


@case()
def checkpoint_twice_with_other_dropout(run: Run) -> Job:
    """Two checkpoints with dropout between them: the order of the draws is the order of eager code."""
    body = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Dropout(0.5))
    other = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.2))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.other = body, other

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.dropout(checkpoint(self.body, x, use_reentrant=False), 0.3)
            return checkpoint(self.other, hidden, use_reentrant=False)

    return usual_job(run, Two(), calls=4)


@case()
def functional_call(run: Run) -> Job:
    """The parameters are given to the module as a dictionary."""
    module = mlp()
    opt = sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        params = dict(module.named_parameters())
        loss = F.cross_entropy(torch.func.functional_call(module, params, (x,)), y)
        grads = run.grads(torch.autograd.grad(loss, list(params.values())))
        for param, grad in zip(params.values(), grads, strict=True):
            param.grad = grad
        opt.step()
        opt.zero_grad()
        return loss

    return Job(step=step, batches=class_batches(run), objects={"model": module, "opt": opt})
