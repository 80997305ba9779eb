"""Small models and losses that many cases share: a few hundred parameters at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.behaviour.harness import Job, Registry, Run
from tests.harness.training import backward_and_step

FEATURES, HIDDEN, CLASSES, ROWS = 6, 8, 3, 5


def mlp(dropout: float = 0.0) -> nn.Sequential:
    """Two linear layers; with dropout between them when asked."""
    middle = [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), *middle, nn.Linear(HIDDEN, CLASSES))


def batch_norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    """SGD with momentum: unlike Adam it is not blind to the scale of a gradient."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def class_batches(run: Run, calls: int = 3, rows: int = ROWS) -> list[tuple[Tensor, ...]]:
    return run.batches(calls, (rows, FEATURES), classes=CLASSES)


def cut(batches: Sequence[tuple[Any, ...]], sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """The first rows of each batch: as many as `sizes` says."""
    return [tuple(one[:size] for one in batch) for batch, size in zip(batches, sizes, strict=True)]


def unwrap(model: Any) -> Any:
    """The module itself, where DistributedDataParallel is around it."""
    return getattr(model, "module", model)


def step_job(
    run: Run,
    step: Callable[..., Any],
    module: nn.Module,
    *,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    batches: Sequence[tuple[object, ...]] | None = None,
    between: Callable[[int], object] | None = None,
    ddp: Mapping[str, Any] | None = None,
    **objects: object,
) -> Job:
    """Compiles ``step(model, opt, *batch)`` with model and optimizer in its closure; records both, and `objects`."""
    model, opt = run.model(module, **(ddp or {})), optimizer(module)
    return Job(
        step=run.compile(lambda *batch: step(model, opt, *batch)),
        batches=class_batches(run) if batches is None else batches,
        objects={"model": module, "opt": opt, **objects},
        between=between,
    )


def usual_job(
    run: Run,
    module: nn.Module,
    *,
    loss: Callable[..., Tensor] = loss_of,
    optimizer: Callable[[nn.Module], Optimizer] | None = None,
    batches: Sequence[tuple[object, ...]] | None = None,
    calls: int = 3,
    rows: int = ROWS,
    between: Callable[[int], object] | None = None,
    ddp: Mapping[str, Any] | None = None,
    **sgd_options: Any,
) -> Job:
    """The most ordinary step on `module`: ``loss(model, *batch)``, backward, update, zero_grad."""

    def step(model: Any, opt: Optimizer, *batch: Any) -> Tensor:
        return backward_and_step(loss(model, *batch), opt)

    return step_job(
        run,
        step,
        module,
        optimizer=optimizer or (lambda module: sgd(module, **sgd_options)),
        batches=class_batches(run, calls, rows) if batches is None else batches,
        between=between,
        ddp=ddp,
    )


def add_step(
    registry: Registry,
    *,
    module: Callable[[], nn.Module] = mlp,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    batches: Callable[[Run], Sequence[tuple[object, ...]]] = class_batches,
    ddp: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function ``step(model, opt, *batch)`` as a case of its name; `options` are those of the case."""

    def register(step: Callable[..., Any]) -> Callable[..., Any]:
        def build(run: Run) -> Job:
            return step_job(run, step, module(), optimizer=optimizer, batches=batches(run), ddp=ddp)

        registry.add(name=step.__name__, **options)(build)
        return step

    return register
