"""What an idiom is, and the small model, optimizer and batches that most of them train.

An idiom is a function that builds a fresh training loop, as people write theirs: what it shows is in its `step`.

    @idiom()
    def print_every_call() -> Loop:
        \"\"\"One line that says what is the matter with it.\"\"\"
        model, opt = small_training()

        def step(x, y):
            loss = update(F.cross_entropy(model(x), y), opt)
            print(f"loss {loss.item():.4f}")

        return loop(step, model=model, opt=opt)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FEATURES, HIDDEN, CLASSES, ROWS = 6, 8, 3, 5

CALLS = 10
"""How often the step of every idiom is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One training, ready to run."""

    step: Callable[..., object]
    """The user's function, as eager code has it."""
    arguments: Callable[[int], tuple[object, ...]]
    """What call i is given; it may also move what the user moves between two calls."""
    observe: Callable[[], dict[str, object]]
    """Everything that somebody can look at between two calls: name -> module, optimizer, list, file's text, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Idiom:
    """A named way of writing a training step."""

    name: str
    group: str
    """The file it is in."""
    build: Callable[[], Loop]
    raises: type[Exception] | None = None
    """What the step raises in some calls, in eager code as well."""
    ranks: bool = False
    """Whether it also runs on two ranks: gradients are averaged after every backward, and Python goes one way."""
    added_on_ranks: bool = False
    """Whether two backwards reach the same parameters. Gradients may be added before or after they are averaged over
    the ranks, so results are equal up to rounding."""
    unrolled: bool = False
    """Whether the compiled step writes a recurrent layer or cell out, and so adds the gradients of its weights in
    another order than the kernel: results are equal up to rounding."""
    inductor: bool = False
    """Whether it also runs on Inductor, which compiles for seconds: at least one idiom of a file does."""

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (self.build.__doc__ or "").strip().splitlines()[0]


IDIOMS: dict[str, Idiom] = {}
"""All idioms by name, in the order of the files and of their lines."""


def idiom(**options: Any) -> Callable[[Callable[[], Loop]], Callable[[], Loop]]:
    """Registers a builder under the name of the function."""

    def register(build: Callable[[], Loop]) -> Callable[[], Loop]:
        name, group = build.__name__, build.__module__.rpartition(".")[2]
        if name in IDIOMS:
            raise ValueError(f"two idioms are named {name}: in {IDIOMS[name].group} and in {group}")
        IDIOMS[name] = Idiom(name=name, group=group, build=build, **options)
        return build

    return register


def loop(
    step: Callable[..., object], arguments: Callable[[int], tuple[object, ...]] | None = None, **objects: object
) -> Loop:
    """A loop over `batch`, or other arguments, that looks at `objects`; functions among them are called for a value."""

    def observe() -> dict[str, object]:
        return {
            name: value() if callable(value) and not isinstance(value, nn.Module) else value
            for name, value in objects.items()
        }

    return Loop(step=step, arguments=arguments or batch, observe=observe)


def mlp(*middle: nn.Module) -> nn.Sequential:
    """Two linear layers, with more between them when asked."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, CLASSES))


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum: unlike Adam it is not blind to the scale of a gradient."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def small_training(*middle: nn.Module) -> tuple[nn.Sequential, torch.optim.SGD]:
    """A model and its optimizer."""
    model = mlp(*middle)
    return model, sgd(model)


_alike: list[bool] = []
"""Not empty where all ranks have the same batches; some idioms draw theirs in threads."""


@contextmanager
def batches_of_rank_0() -> Iterator[None]:
    """While open, batches are the same on every rank."""
    _alike.append(True)
    try:
        yield
    finally:
        _alike.pop()


def generator(call: int) -> torch.Generator:
    """Draws the data of a call: another one in every call and on every rank."""
    rank = dist.get_rank() if dist.is_initialized() and not _alike else 0
    return torch.Generator().manual_seed(1000 * rank + call)


def batch(call: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    draw = generator(call)
    return torch.randn(rows, FEATURES, generator=draw), torch.randint(CLASSES, (rows,), generator=draw)


def features(call: int) -> tuple[Tensor]:
    """Features alone."""
    return batch(call)[:1]


def update(loss: Tensor, opt: torch.optim.Optimizer) -> Tensor:
    """Backward, one update, gradients dropped; returns the loss without its graph."""
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()
