"""Cases about what the model is made of: parameters, buffers, layers, random numbers."""

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
    batch_norm_net,
    class_batches,
    loss_of,
    mlp,
    sgd,
    unwrap,
    usual_job,
)
from tests.harness.training import backward_and_step

registry = Registry()
case, step_case = registry.add, partial(add_step, registry)

UNUSED: dict[str, Any] = {"find_unused_parameters": True}


class Tied(nn.Module):
    """One matrix as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(FEATURES, HIDDEN)
        self.head = nn.Linear(HIDDEN, FEATURES, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


@case()
def tied_weights(run: Run) -> Job:
    generator = torch.Generator().manual_seed(run.rank)
    batches = [
        (torch.randint(FEATURES, (ROWS, 4), generator=generator, device="cpu").to(run.device),) for _ in range(3)
    ]

    def loss(model: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return usual_job(run, Tied(), loss=loss, batches=batches)


@case()
def one_layer_used_twice(run: Run) -> Job:
    layer = nn.Linear(FEATURES, FEATURES)
    return usual_job(run, nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(FEATURES, CLASSES)))


@case()
def frozen_parameters(run: Run) -> Job:
    """Frozen in the middle of the model, and still given to the optimizer."""
    module = mlp()
    module[0].bias.requires_grad_(False)
    module[2].weight.requires_grad_(False)
    return usual_job(run, module)


class Extras(nn.Module):
    """A model with a layer that the forward skips and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.skipped = nn.Linear(HIDDEN, CLASSES)
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@case()
def unused_parameters(run: Run) -> Job:
    """No gradient and no optimizer state for them, as in eager code."""
    return usual_job(run, Extras(), ddp=UNUSED, weight_decay=0.1)


@case()
def unused_parameters_adam(run: Run) -> Job:
    return usual_job(
        run, Extras(), ddp=UNUSED, optimizer=lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2)
    )


@case(traces=(2,))
def parameters_without_optimizer(run: Run) -> Job:
    """The optimizer holds half of the parameters: the gradients of the others pile up."""
    return usual_job(run, mlp(), optimizer=lambda module: sgd(module[2]))


class Counting(nn.Module):
    """Buffers of three kinds written in the forward, in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(FEATURES), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.rows += len(x)
            self.last = x[0] + self.last
        return self.body(x - self.mean)


@case(live=True)
def buffers_written_in_forward(run: Run) -> Job:
    return usual_job(run, Counting())


@case()
def batch_norm(run: Run) -> Job:
    return usual_job(run, batch_norm_net())


# Broadcasting buffers before the second forward would write what the first backward still needs.
@step_case(module=batch_norm_net, ddp={"broadcast_buffers": False})
def batch_norm_called_twice(model: Any, opt: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Two forwards of one model in one step: the statistics move twice."""
    module = unwrap(model)
    loss = F.cross_entropy(model(torch.cat([x, -x])), torch.cat([y, y])) + module[0].weight.square().sum()
    loss.backward()
    with torch.no_grad():
        module(x)
    opt.step()
    opt.zero_grad()
    return loss


@case()
def dropout(run: Run) -> Job:
    """The same masks as eager code, and the generator left in the same state."""
    return usual_job(run, mlp(dropout=0.5))


class Noisy(nn.Module):
    """Random numbers of several kinds drawn in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(len(x), device=x.device).argsort()
        x = x[order] + 0.1 * torch.randn_like(x) + 0.1 * torch.rand(x.shape, device=x.device)
        return F.gumbel_softmax(self.body(x), tau=2.0)


@case()
def random_numbers_in_forward(run: Run) -> Job:
    return usual_job(run, Noisy())


class Recurrent(nn.Module):
    """A GRU's gates are parts of one tensor, and eager code computes them in place, row by row; a compiled step gives
    them memory of their own. Numbers that fill no whole vectors are computed otherwise by ATen, which rounds a
    sigmoid differently: rows as wide as two vectors of AVX-512 leave none."""

    def __init__(self, kind: type[nn.Module], *, width: int = 32) -> None:
        super().__init__()
        self.cell = kind(2, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.cell(x.view(len(x), 3, 2))
        return self.head(out[:, -1])


for _kind in (nn.GRU, nn.LSTM, nn.RNN):
    case(name=f"recurrent_{_kind.__name__.lower()}")(lambda run, kind=_kind: usual_job(run, Recurrent(kind)))


@case(tolerance=4 * torch.finfo().eps, tolerance_reason="sigmoids of rows of four numbers, as `Recurrent` says")
def recurrent_gru_of_narrow_rows(run: Run) -> Job:
    return usual_job(run, Recurrent(nn.GRU, width=4))


class Attention(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=8, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = F.pad(x, (0, 2)).view(len(x), 2, 4)
        mask = nn.Transformer.generate_square_subsequent_mask(2, device=x.device, dtype=x.dtype)
        return self.head(self.layer(tokens, src_mask=mask).mean(1))


@case()
def transformer_layer(run: Run) -> Job:
    return usual_job(run, Attention(0.0))


@case()
def transformer_layer_with_dropout(run: Run) -> Job:
    return usual_job(run, Attention(0.2))


@case()
def weight_norm(run: Run) -> Job:
    module = mlp()
    nn.utils.parametrizations.weight_norm(module[0])
    return usual_job(run, module)


@case()
def spectral_norm(run: Run) -> Job:
    """Power iteration writes its vectors in every training forward."""
    module = mlp()
    nn.utils.parametrizations.spectral_norm(module[0])
    # The broadcast of buffers writes into vectors that the backward still needs.
    return usual_job(run, module, ddp={"broadcast_buffers": False})


@case(live=False)
def thawed_in_the_step(run: Run) -> Job:
    """What is frozen before and after the step is trained in it, and averaged over ranks."""
    module = mlp()
    model, opt = run.model(module), sgd(module, momentum=0.0)
    module[0].requires_grad_(False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        module[0].requires_grad_(True)
        loss = backward_and_step(loss_of(model, x, y), opt)
        module[0].requires_grad_(False)
        return loss

    return Job(step=run.compile(step), batches=class_batches(run, 3), objects={"model": module, "opt": opt})


@case(live=False, ranks=False, traces=(2,))
def frozen_from_the_first_step_on(run: Run) -> Job:
    """The second call is of another trace, and the third one of none."""
    module = mlp()
    model, opt = run.model(module), sgd(module)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = backward_and_step(loss_of(model, x, y), opt)
        module[0].requires_grad_(False)
        return loss

    return Job(step=run.compile(step), batches=class_batches(run, 4), objects={"model": module, "opt": opt})


@case(live=False, ranks=False, traces=(2,))
def adversaries_in_turn(run: Run) -> Job:
    """Each is frozen while the other one trains: the critic from the end of a step to the next one, too."""
    maker, critic = nn.Linear(FEATURES, FEATURES), mlp()
    maker_opt, critic_opt = sgd(maker), sgd(critic)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        made = maker(x)
        critic.requires_grad_(True)
        critic_loss = backward_and_step(loss_of(critic, x, y) - loss_of(critic, made.detach(), y), critic_opt)
        critic.requires_grad_(False)
        return critic_loss, backward_and_step(loss_of(critic, made, y), maker_opt)

    objects = {"maker": maker, "critic": critic, "opts": [maker_opt, critic_opt]}
    return Job(step=run.compile(step), batches=class_batches(run, 4), objects=objects)
