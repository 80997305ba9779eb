"""Cases about what changes from one call to the next: it must be seen, retraced once, and said."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.behaviour.harness import Job, Registry, Run
from tests.behaviour.small_models import (
    FEATURES,
    HIDDEN,
    add_step,
    batch_norm_net,
    class_batches,
    cut,
    loss_of,
    mlp,
    sgd,
    step_job,
    usual_job,
)
from tests.harness.training import backward_and_step

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)


@case(traces=(2,))
def last_batch_is_smaller(run: Run) -> Job:
    """Two epochs of two full batches and a smaller one: traced once per size."""
    return usual_job(run, batch_norm_net(), batches=cut(class_batches(run, 6), [5, 5, 3, 5, 5, 3]))


@case(traces=(2,))
def train_and_eval_flips(run: Run) -> Job:
    """One step in both modes: dropout and batch statistics follow the flag, and each mode is traced once."""
    module = nn.Sequential(batch_norm_net(), nn.Dropout(0.5))
    return usual_job(run, module, calls=6, between=lambda call: module.train(call % 2 == 1))


@case(traces=(2,))
def one_layer_set_to_eval(run: Run) -> Job:
    module = nn.Sequential(batch_norm_net(), nn.Dropout(0.5))
    return changed(run, module, lambda opt: module[0][1].eval())


def changed(
    run: Run, module: nn.Module, change: Callable[[torch.optim.Optimizer], object], *, calls: int = 4, **options: Any
) -> Job:
    """The usual step, with ``change(opt)`` made once, after the second call."""

    def between(call: int) -> None:
        if call == 1:
            change(job.objects["opt"])  # type: ignore[arg-type]

    job = usual_job(run, module, calls=calls, between=between, **options)
    return job


@case()
def rate_set_by_hand(run: Run) -> Job:
    return changed(run, mlp(), lambda opt: opt.param_groups[0].update(lr=0.01))


@case(traces=(1, 2))
def momentum_set_by_hand(run: Run) -> Job:
    return changed(run, mlp(), lambda opt: opt.param_groups[0].update(momentum=0.5))


@case(traces=(1, 2))
def weight_decay_set_by_hand(run: Run) -> Job:
    """From zero to a number: SGD takes another branch, so the graph has another shape."""
    return changed(run, mlp(), lambda opt: opt.param_groups[0].update(weight_decay=0.1))


@case(traces=(2,))
def nesterov_switched_on(run: Run) -> Job:
    return changed(run, mlp(), lambda opt: opt.param_groups[0].update(nesterov=True))


@case(traces=(2,))
def parameter_added_to_group(run: Run) -> Job:
    """The head is trained from the third call on."""
    module = mlp()
    opt = sgd(module[0])

    def step(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        for param in module.parameters():
            param.grad = None
        return loss

    def between(call: int) -> None:
        if call == 1:
            opt.add_param_group({"params": list(module[2].parameters()), "lr": 0.02})

    return step_job(run, step, module, optimizer=lambda _: opt, batches=class_batches(run, 4), between=between)


@case(traces=(1, 2))
def state_loaded(run: Run) -> Job:
    """Back to the state after the first call: parameters, buffers, moments and rate."""
    module, saved = batch_norm_net(), list[Any]()
    opt = sgd(module)

    def between(call: int) -> None:
        if call == 0:
            saved.extend(copy.deepcopy([module.state_dict(), opt.state_dict()]))
            opt.param_groups[0]["lr"] = 0.3
        if call == 2:
            module.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])

    return usual_job(run, module, optimizer=lambda _: opt, calls=5, between=between)


@case(ranks=False, traces=(2,))  # DistributedDataParallel goes on with the parameter it was built around
def parameter_replaced(run: Run) -> Job:
    """Another object under the same name, in the module and in the optimizer."""
    module = mlp()

    def replace(opt: torch.optim.Optimizer) -> None:
        old = module[0].weight
        module[0].weight = nn.Parameter(torch.full_like(old, 0.1))
        opt.param_groups[0]["params"][0] = module[0].weight
        del opt.state[old]

    return changed(run, module, replace)


@case(ranks=False, traces=(2,))
def parameter_replaced_by_another_shape(run: Run) -> Job:
    """Both layers grow; the optimizer starts anew."""
    module = mlp()
    opt = sgd(module)
    holder = {"opt": opt}

    @run.compile
    def step(x: Tensor, y: Tensor) -> Tensor:
        return backward_and_step(loss_of(module, x, y), holder["opt"])

    def between(call: int) -> None:
        if call == 1:
            module[0], module[2] = nn.Linear(FEATURES, HIDDEN + 3), nn.Linear(HIDDEN + 3, 3)
            holder["opt"] = sgd(module)

    objects = {"model": module, "opt": lambda: holder["opt"].state_dict()}
    return Job(step=step, batches=class_batches(run, 4), objects=objects, between=between)


@case(ranks=False, traces=(1, 2))
def parameter_data_replaced(run: Run) -> Job:
    """``param.data = ...`` keeps the object and changes its storage."""
    module = mlp()

    def replace(opt: torch.optim.Optimizer) -> None:
        module[0].weight.data = torch.full((HIDDEN, FEATURES), 0.1)

    return changed(run, module, replace)


class Scaled(nn.Module):
    """A body with a Python number and a Python flag that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.scale, self.squared = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        out = self.scale * self.body(x)
        return out.square() if self.squared else out


@case(traces=(2,))
def module_number_changed(run: Run) -> Job:
    module = Scaled()
    return changed(run, module, lambda opt: setattr(module, "scale", 0.25))


@case(traces=(2,))
def module_flag_changed(run: Run) -> Job:
    module = Scaled()
    return changed(run, module, lambda opt: setattr(module, "squared", True))


class Settings:
    factor = 1.0


@case(traces=(2,))
def attribute_put_in_front_of_that_of_the_class(run: Run) -> Job:
    """An object that had no attributes of its own gets one."""
    settings = Settings()
    return usual_job(
        run,
        mlp(),
        loss=lambda model, x, y: loss_of(model, x, y) * settings.factor,
        between=lambda call: setattr(settings, "factor", 0.5),
    )


@case(traces=(2,))
def dropout_rate_changed(run: Run) -> Job:
    module = mlp(dropout=0.5)
    return changed(run, module, lambda opt: setattr(module[2], "p", 0.1))


@case(traces=(2,))
def layer_replaced(run: Run) -> Job:
    """A layer without parameters gives way to another."""
    module = mlp()
    return changed(run, module, lambda opt: setattr(module, "1", nn.ReLU()))


@case(traces=(2,))
def forward_hook_added(run: Run) -> Job:
    module = mlp()
    return changed(run, module, lambda opt: module[1].register_forward_hook(lambda layer, args, out: 0.5 * out))


@case(traces=(2,))
def backward_hook_added(run: Run) -> Job:
    module = mlp()
    hook = lambda layer, grads_in, grads_out: (0.5 * grads_in[0],)  # noqa: E731
    return changed(run, module, lambda opt: module[2].register_full_backward_hook(hook))


@case(traces=(2,))
def parameter_hook_added(run: Run) -> Job:
    module = mlp()
    return changed(run, module, lambda opt: module[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01)))


@case(traces=(2,))
def hook_removed(run: Run) -> Job:
    module = mlp()
    handle = module[1].register_forward_hook(lambda layer, args, out: 0.5 * out)
    return changed(run, module, lambda opt: handle.remove())


@case(ranks=False, traces=(2,))  # DistributedDataParallel waits for the frozen parameter
def parameter_frozen(run: Run) -> Job:
    module = mlp()
    return changed(run, module, lambda opt: module[0].requires_grad_(False))


@case(traces=(2,))
def gradients_preset(run: Run) -> Job:
    """Gradients that the caller left before the third call are added to."""
    module = mlp()

    def preset(opt: torch.optim.Optimizer) -> None:
        for param in module.parameters():
            param.grad = torch.full_like(param, 0.1)

    return changed(run, module, preset)


@case(traces=(1, 2))
def parameters_written_by_the_caller(run: Run) -> Job:
    """The caller writes parameters and moments in place: they are read at the next call."""
    module = mlp()

    def write(opt: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
                opt.state[param]["momentum_buffer"].zero_()

    return changed(run, module, write)


@case(traces=(3,))
def optimizer_state_cleared(run: Run) -> Job:
    """SGD with dampening: its first update has no moment to damp, and so has the first one after the clearing.

    The state made after the clearing is a new set of tensors, so the graph of later updates is captured once more.
    """
    return changed(run, mlp(), lambda opt: opt.state.clear(), dampening=0.5)


@case(traces=(2,))
def argument_changed(run: Run) -> Job:
    """A Python number given at every call; its second value comes back and is not traced again."""

    def loss(model: Any, x: Tensor, y: Tensor, smoothing: float) -> Tensor:
        return nn.functional.cross_entropy(model(x), y, label_smoothing=smoothing)

    values = [0.1, 0.2, 0.1, 0.2]
    batches = [(x, y, value) for (x, y), value in zip(class_batches(run, 4), values, strict=True)]
    return usual_job(run, mlp(), loss=loss, batches=batches)


class ToFloat(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float() / 3


@case(traces=(2,))
def dtype_of_the_batch_changed(run: Run) -> Job:
    """The same shapes in float64 every second call."""
    batches = [(x if call % 2 else x.double(), y) for call, (x, y) in enumerate(class_batches(run, 4))]
    return usual_job(run, nn.Sequential(ToFloat(), mlp()), batches=batches)


@case(traces=(1, 2))
def strides_of_the_batch_changed(run: Run) -> Job:
    """Every second batch is a transposed view with the same shape."""
    batches = [(x if call % 2 else x.t().contiguous().t(), y) for call, (x, y) in enumerate(class_batches(run, 4))]
    return usual_job(run, mlp(), batches=batches)


@case()
def rows_differ_by_rank(run: Run) -> Job:
    """Every rank has its own batch size, always: the mean over the ranks does not weigh them, as in eager code."""
    return usual_job(run, batch_norm_net(), rows=5 - 2 * run.rank)


@case(traces=(1, 2))
def last_batch_is_smaller_on_one_rank(run: Run) -> Job:
    """Uneven data: the last rank retraces and the others do not, and nobody waits for nobody."""
    last = 5 - 2 * run.rank
    return usual_job(run, batch_norm_net(), batches=cut(class_batches(run, 5), [5, 5, last, 5, last]))


@step_case(
    optimizer=lambda module: sgd(module, momentum=0.9),
    batches=lambda run: [(*batch, number) for number, batch in enumerate(class_batches(run, 9))],
    traces=(5,),
)
def number_of_the_batch_given(model: Any, opt: torch.optim.Optimizer, x: Tensor, y: Tensor, number: int) -> Tensor:
    """Gradients are added up over three batches. With the number and without gradients, with both, the update."""
    loss = loss_of(model, x, y) / 3
    loss.backward()
    if (number + 1) % 3 == 0:
        opt.step()
        opt.zero_grad()
    return loss


@case(live=True)
def weight_and_rate_by_numbers_of_the_call(run: Run) -> Job:
    """A weight of the loss and a warm-up that the step reckons itself, from two numbers that it is given."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    @run.compile
    def step(x: Tensor, y: Tensor, beta: float, *, number: int) -> tuple[Tensor, float]:
        rate = 0.1 * (number + 1) / 8
        opt.param_groups[0]["lr"] = rate
        loss = loss_of(model, x, y) + beta * sum(param.square().sum() for param in module.parameters())
        backward_and_step(loss, opt)
        return loss, rate

    batches = [(*batch, 0.1 / (1 + number), number) for number, batch in enumerate(class_batches(run, 6))]
    keyed = lambda x, y, beta, number: step(x, y, beta, number=number)  # noqa: E731
    return Job(step=keyed, batches=batches, objects={"model": module, "opt": opt})


class Cooled(nn.Module):
    """A network whose outputs are divided by a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x) / self.temperature
        return out


@case(traces=(2,))
def attribute_set_before_every_call(run: Run) -> Job:
    module = Cooled()
    return usual_job(run, module, calls=6, between=lambda call: setattr(module, "temperature", 1.0 + call / 4))
